-- Fail a job that has waited longer than it may, unless it has started, or waits anew, since it was looked at.
-- KEYS: job, log, queue, scheduled and failed registry, results, jobs by their deadlines
-- ARGV: id, data of the terminal event as JSON, ttl in seconds (below 0: for ever), now as RQ writes it, expiry score,
--       when it was queued as RQ wrote it (or empty), the failure as RQ writes it
-- Returns 1 if the job has failed by this.
-- uses end_waiting
local f = redis.call('HMGET', KEYS[1], 'status', 'enqueued_at', 'sl_end', 'sl_cancel')
if f[1] ~= 'queued' and f[1] ~= 'scheduled' then return 0 end
if (f[2] or '') ~= ARGV[6] then return 0 end
-- Without an end, the log is that of this life: it has had a slot, or its cancel was promised.
if not f[3] and (f[4] or redis.call('EXISTS', KEYS[2]) == 1) then return 0 end
redis.call('LREM', KEYS[3], 0, ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZREM', KEYS[7], ARGV[1])
redis.call('HSET', KEYS[1], 'status', 'failed', 'ended_at', ARGV[4])
redis.call('ZADD', KEYS[5], ARGV[5], ARGV[1])
redis.call('XADD', KEYS[6], 'MAXLEN', '~', 10, '*', 'type', 2, 'worker_name', '', 'exc_string', ARGV[7])
if tonumber(ARGV[3]) > 0 then redis.call('EXPIRE', KEYS[6], ARGV[3]) end
end_waiting(KEYS[1], KEYS[2], ARGV[1], 'failed', ARGV[2], ARGV[3])
return 1
