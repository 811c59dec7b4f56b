-- Forget a file that no open batch uses, and put its objects in the trash.
-- KEYS: file, its parts, its users, files index, files by expiry, trash
-- ARGV: id, now in s, name of the object of an uploaded file
-- Returns missing, in_use or ok.
local purpose = redis.call('HGET', KEYS[1], 'purpose')
if not purpose then
  redis.call('ZREM', KEYS[5], ARGV[1])
  return 'missing'
end
if redis.call('SCARD', KEYS[3]) > 0 then return 'in_use' end
if purpose == 'batch' then redis.call('ZADD', KEYS[6], ARGV[2], ARGV[3]) end
for _, entry in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
  redis.call('ZADD', KEYS[6], ARGV[2], cjson.decode(entry).name)
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZREM', KEYS[5], ARGV[1])
return 'ok'
