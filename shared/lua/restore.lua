-- Register a job again that a worker holds and that Redis may have forgotten, as one does that comes back without its last
-- seconds: put its record, its place in the held list and its execution back as they were after the pull.
-- KEYS: job, queue, held list, jobs index, workers, rq:queues, the model's live queues, scheduled and deferred registry
-- ARGV: id, execution id, worker, queue name, run of the server in which all that the worker holds was registered last,
--       pulls of the job so far, when it was made in ms, now in s, when the registration runs out and how long that is,
--       whether a job that is not there is made anew (1), then field, value, … of its record
-- Returns ok, if the caller owns it (again), ended, if its end is committed as well, or lost.
local id, execution, worker, origin = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local f = redis.call('HMGET', KEYS[1], 'status', 'sl_exec', 'sl_attempts', 'sl_end')
if f[2] == execution then return f[4] and 'ended' or 'ok' end
-- The same server forgets nothing: whatever has changed was changed by somebody.
if string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') == ARGV[5] then return 'lost' end
-- Each pull counts, so a record with fewer of them is older than ours. If there is none, nobody has it.
if not f[1] and ARGV[11] == '0' then return 'lost' end
if f[1] then
  local waits_or_runs = f[1] == 'queued' or f[1] == 'scheduled' or f[1] == 'deferred' or f[1] == 'started'
  if not waits_or_runs or tonumber(f[3] or 0) >= tonumber(ARGV[6]) then return 'lost' end
end

local fields = {}
for i = 12, #ARGV, 2 do
  fields[#fields + 1], fields[#fields + 2] = ARGV[i], ARGV[i + 1]
  if ARGV[i] == 'sl_idempotency' then redis.call('SET', ARGV[i + 1], id, 'NX', 'EX', 86400) end
end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('PERSIST', KEYS[1])
redis.call('LREM', KEYS[2], 0, id)
redis.call('ZREM', KEYS[8], id)
redis.call('ZREM', KEYS[9], id)
redis.call('LREM', KEYS[3], 0, id)
redis.call('RPUSH', KEYS[3], id)
redis.call('ZADD', KEYS[4], 'NX', ARGV[7], id)
redis.call('SADD', KEYS[5], worker)
redis.call('SADD', KEYS[6], KEYS[2])
redis.call('SADD', KEYS[7], origin)
local name = id .. ':' .. execution
redis.call('HSET', 'rq:execution:' .. name, 'id', execution, 'job_id', id, 'created_at', ARGV[8], 'last_heartbeat',
           ARGV[8], 'worker_name', worker)
redis.call('EXPIRE', 'rq:execution:' .. name, ARGV[10])
redis.call('ZADD', 'rq:executions:' .. id, ARGV[9], execution)
redis.call('EXPIRE', 'rq:executions:' .. id, ARGV[10])
redis.call('ZADD', 'rq:wip:' .. origin, ARGV[9], name)
redis.call('SADD', 'rq:worker:' .. worker .. ':executions', name)
return 'ok'
