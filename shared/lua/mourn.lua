-- Write the terminal event of a job that RQ's own `job.cancel()` has cancelled and that nobody has ended since.
-- KEYS: job, log
-- ARGV: id, data of the event as JSON, ttl in seconds (below 0: for ever), tokens that the log had when the data was made
-- Returns 1 if it did.
-- uses end_waiting
local f = redis.call('HMGET', KEYS[1], 'status', 'sl_end')
if f[1] ~= 'canceled' or f[2] or logged_tokens(KEYS[1], KEYS[2]) ~= tonumber(ARGV[4]) then return 0 end
-- A worker that has not noticed may write no more.
redis.call('HDEL', KEYS[1], 'sl_exec')
end_waiting(KEYS[1], KEYS[2], ARGV[1], 'cancelled', ARGV[2], ARGV[3])
return 1
