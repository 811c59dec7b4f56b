-- The commit point: append the terminal event, once, if the caller still owns the job and nobody cancelled it.
-- KEYS: job, log
-- ARGV: execution id, status to end with, log id, event name, data as JSON, ttl of the log in seconds
-- Returns ok, gone (no such job), lost (another owner), ended (already committed) or cancelled (commit as that).
local f = redis.call('HMGET', KEYS[1], 'status', 'sl_exec', 'sl_end', 'sl_cancel')
if not f[1] then return 'gone' end
if f[2] ~= ARGV[1] then return 'lost' end
if f[3] then return 'ended' end
local cancelled = f[4] or f[1] == 'canceled' or f[1] == 'stopped'
if cancelled and ARGV[2] ~= 'cancelled' then return 'cancelled' end
local id = redis.call('XADD', KEYS[2], ARGV[3], 'event', ARGV[4], 'data', ARGV[5])
redis.call('PUBLISH', KEYS[2], '{"event":"' .. ARGV[4] .. '","id":"' .. id .. '","data":' .. ARGV[5] .. '}')
redis.call('EXPIRE', KEYS[2], ARGV[6])
redis.call('HSET', KEYS[1], 'sl_end', ARGV[2])
return 'ok'
