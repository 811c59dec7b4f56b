-- Take webhooks that are due. Each is due again when the lease has run out, so none is lost with its sender.
-- KEYS: outbox
-- ARGV: how many, lease in ms
-- Returns for each its id and the fields of its hash.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local claimed = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])) do
  local key = 'slotline:webhook:' .. id
  if redis.call('EXISTS', key) == 1 then
    redis.call('ZADD', KEYS[1], now_ms + ARGV[2], id)
    redis.call('HINCRBY', key, 'tries', 1)
    redis.call('HSETNX', key, 'first_ms', now_ms)
    claimed[#claimed + 1] = {id, redis.call('HGETALL', key)}
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return claimed
