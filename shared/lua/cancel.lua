-- Cancel a job: at once where it waits, by a flag and a word to its worker where it runs.
-- KEYS: job, log, queue, scheduled, deferred, ready and cancelled registry
-- ARGV: id, data of the terminal event as JSON, ttl in seconds (below 0: for ever), now as RQ writes it, expiry score,
--       tokens that the log had when the data was made
-- Returns missing, ended, cancelled (now or before), running (the flag is set) or stale (make the data again).
-- uses end_waiting
local f = redis.call('HMGET', KEYS[1], 'status', 'sl_end', 'worker_name', 'created_at')
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
if logged_tokens(KEYS[1], KEYS[2]) ~= tonumber(ARGV[6]) then return 'stale' end
redis.call('LREM', KEYS[3], 0, ARGV[1])
for i = 4, 6 do redis.call('ZREM', KEYS[i], ARGV[1]) end
redis.call('HSET', KEYS[1], 'status', 'canceled', 'ended_at', ARGV[4], 'sl_cancel', f[4] or '1')
redis.call('ZADD', KEYS[7], ARGV[5], ARGV[1])
end_waiting(KEYS[1], KEYS[2], ARGV[1], 'cancelled', ARGV[2], ARGV[3])
return 'cancelled'
