-- Take the failed lines of an ended batch out of its results and open it again.
-- KEYS: batch, done bitmap, failed bitmap, open batches, files index, files by expiry, trash, input file,
--       users of the input file
-- ARGV: id, now in s, new expires_at, states it may be in with commas around each
-- Returns missing, no_file, no_failed, ok, or the state that does not allow it.
local f = redis.call('HMGET', KEYS[1], 'status', 'failed', 'output_file_id', 'error_file_id')
if not f[1] then return 'missing' end
if not string.find(ARGV[4], ',' .. f[1] .. ',', 1, true) then return f[1] end
if (tonumber(f[2]) or 0) == 0 then return 'no_failed' end
if redis.call('EXISTS', KEYS[8]) == 0 then return 'no_file' end
redis.call('BITOP', 'XOR', KEYS[2], KEYS[2], KEYS[3])
redis.call('DEL', KEYS[3])
if f[4] then
  local key = 'slotline:file:' .. f[4]
  for _, entry in ipairs(redis.call('LRANGE', key .. ':parts', 0, -1)) do
    redis.call('ZADD', KEYS[7], ARGV[2], cjson.decode(entry).name)
  end
  redis.call('DEL', key, key .. ':parts', key .. ':batches')
  redis.call('ZREM', KEYS[5], f[4])
  redis.call('ZREM', KEYS[6], f[4])
end
redis.call('HDEL', KEYS[1], 'error_file_id', 'finalizing_at', 'completed_at', 'failed_at', 'expired_at',
           'cancelling_at', 'cancelled_at')
redis.call('HSET', KEYS[1], 'status', 'in_progress', 'failed', '0', 'in_progress_at', ARGV[2],
           'expires_at', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'retries', 1)
for i = 1, 2 do redis.call('PERSIST', KEYS[i]) end
redis.call('SADD', KEYS[4], ARGV[1])
redis.call('SADD', KEYS[9], ARGV[1])
if f[3] and redis.call('EXISTS', 'slotline:file:' .. f[3]) == 1 then
  local key = 'slotline:file:' .. f[3]
  redis.call('SADD', key .. ':batches', ARGV[1])
  if redis.call('HEXISTS', KEYS[1], 'output_ttl_s') == 0 then
    redis.call('HDEL', key, 'expires_at')
    redis.call('ZREM', KEYS[6], f[3])
  end
end
return 'ok'
