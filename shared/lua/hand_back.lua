-- Give pulled jobs back to the front of their queues, in their order, if the caller still owns them.
-- KEYS: held list, doorbell
-- ARGV: job id, execution id, … (in the order they should come out again)
-- Returns the ids that went back.
local back = {}
for i = #ARGV - 1, 1, -2 do
  local key = 'rq:job:' .. ARGV[i]
  local f = redis.call('HMGET', key, 'sl_exec', 'status', 'origin', 'sl_end')
  redis.call('LREM', KEYS[1], 1, ARGV[i])
  if f[1] == ARGV[i + 1] and f[2] == 'started' and not f[4] then
    redis.call('HSET', key, 'status', 'queued')
    redis.call('HDEL', key, 'sl_exec')
    redis.call('LPUSH', 'rq:queue:' .. f[3], ARGV[i])
    redis.call('LPUSH', KEYS[2], '1')
    back[#back + 1] = ARGV[i]
  end
end
redis.call('LTRIM', KEYS[2], 0, 255)
return back
