-- Queue a failed or cancelled job again, to run from the start.
-- KEYS: job, log, queue, doorbell, failed and cancelled registry, jobs by their deadlines
-- ARGV: id, now as RQ writes it, when it has waited too long in s (empty: never)
-- Returns ok, missing, or the status that does not allow it.
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return 'missing' end
if status ~= 'failed' and status ~= 'canceled' and status ~= 'stopped' then return status end
redis.call('DEL', KEYS[2])
-- Without `sl_exec`, a worker that has not noticed the end can write no more.
redis.call('HDEL', KEYS[1], 'sl_end', 'sl_cancel', 'sl_exec', 'started_at', 'ended_at', 'exc_info', 'worker_name',
           'sl_used_ms', 'sl_prompt_ms', 'sl_crashes', 'sl_crash_at')
local ticket = redis.call('INCR', 'slotline:tickets:' .. string.sub(KEYS[3], 10))  -- behind `rq:queue:`
redis.call('HSET', KEYS[1], 'status', 'queued', 'enqueued_at', ARGV[2],
           'sl_ticket', string.format('%.0f ', ticket) .. ARGV[2])
redis.call('PERSIST', KEYS[1])
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('ZREM', KEYS[6], ARGV[1])
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[7], ARGV[3], ARGV[1]) end
redis.call('RPUSH', KEYS[3], ARGV[1])
redis.call('LPUSH', KEYS[4], '1')
redis.call('LTRIM', KEYS[4], 0, 0)
return 'ok'
