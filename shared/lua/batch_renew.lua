-- Stay the runner of a batch, or give it up.
-- KEYS: batch, lease
-- ARGV: fence, lease in ms (0: give it up)
-- Returns 1, or 0 where the fence has moved on.
local f = redis.call('HMGET', KEYS[1], 'fence', 'owner')
if f[1] ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('HINCRBY', KEYS[1], 'fence', 1)
  redis.call('DEL', KEYS[2])
elseif redis.call('PEXPIRE', KEYS[2], ARGV[2]) == 0 then  -- which a full Redis allows, unlike SET
  redis.call('SET', KEYS[2], f[2], 'PX', ARGV[2])
end
return 1
