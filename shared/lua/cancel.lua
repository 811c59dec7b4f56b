-- Cancel a job: at once where it waits, by a flag and a word to its worker where it runs.
-- KEYS: job, log, queue, scheduled, deferred, ready and cancelled registry
-- ARGV: id, data of the terminal event as JSON, ttl in seconds (below 0: for ever), now as RQ writes it, expiry score
-- Returns missing, ended, cancelled (now or before) or running (the flag is set).
local f = redis.call('HMGET', KEYS[1], 'status', 'sl_end', 'worker_name', 'created_at', 'sl_notify')
local status = f[1]
if not status then return 'missing' end
if status == 'started' then
  if f[2] == 'cancelled' then return 'cancelled' end
  if f[2] then return 'ended' end
  redis.call('HSET', KEYS[1], 'sl_cancel', '1')
  redis.call('PUBLISH', 'rq:pubsub:' .. (f[3] or ''), '{"command":"slotline-cancel","job_id":"' .. ARGV[1] .. '"}')
  return 'running'
end
if status == 'canceled' or status == 'stopped' then return 'cancelled' end
if status == 'finished' or status == 'failed' then return 'ended' end
redis.call('LREM', KEYS[3], 0, ARGV[1])
for i = 4, 6 do redis.call('ZREM', KEYS[i], ARGV[1]) end
redis.call('HSET', KEYS[1], 'status', 'canceled', 'ended_at', ARGV[4], 'sl_end', 'cancelled',
           'sl_cancel', f[4] or '1')
redis.call('ZADD', KEYS[7], ARGV[5], ARGV[1])
-- Queued again after its end by RQ's own ways: the log is that of its last life, and a log has one end.
if f[2] then redis.call('DEL', KEYS[2]) end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local id = (#last > 0 and string.match(last[1][1], '^%d+') or '0') .. '-*'
id = redis.call('XADD', KEYS[2], id, 'event', 'done', 'data', ARGV[2])
redis.call('PUBLISH', KEYS[2], '{"event":"done","id":"' .. id .. '","data":' .. ARGV[2] .. '}')
if f[5] then
  redis.call('RPUSH', f[5], ARGV[1])
  redis.call('EXPIRE', f[5], 86400)  -- its owner may be gone for good; one that comes back looks at all its jobs
end
if tonumber(ARGV[3]) > 0 then
  redis.call('EXPIRE', KEYS[2], ARGV[3])
  redis.call('EXPIRE', KEYS[1], ARGV[3])
  redis.call('EXPIRE', KEYS[1] .. ':dependents', ARGV[3])
  redis.call('EXPIRE', 'rq:job::' .. ARGV[1] .. ':dependencies', ARGV[3])
end
return 'cancelled'
