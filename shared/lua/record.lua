-- Write to RQ that jobs have completed, as its own handler of success does, and let go of them.
-- KEYS: held list, worker
-- ARGV: worker's name, now as RQ writes it, now in s, then for each job: id, execution id, queue, start of the execution
--       in s, result as RQ writes it, seconds to keep it (below 0: for ever)
-- Returns for each job ok; gone, if it is not as its commit left it and was only let go of; or dependents, if other jobs
-- wait for it, and then nothing has been done.
local worker, now, now_s = ARGV[1], ARGV[2], ARGV[3]
local done, worked_s = 0, 0

local function let_go(id, execution, origin)
  local name = id .. ':' .. execution
  redis.call('DEL', 'rq:execution:' .. name)
  redis.call('ZREM', 'rq:wip:' .. origin, name)
  redis.call('ZREM', 'rq:executions:' .. id, execution)
  redis.call('SREM', 'rq:worker:' .. worker .. ':executions', name)
  -- The oldest entry alone: if the same job was pulled again meanwhile, a later one stands for that.
  redis.call('LREM', KEYS[1], 1, id)
end

local function record(id, execution, origin, began_s, result, ttl)
  local key = 'rq:job:' .. id
  local f = redis.call('HMGET', key, 'status', 'sl_exec')
  -- Recorded already, and only the reply was lost; taken over; erased; or ended by RQ's own tools since.
  if f[1] ~= 'started' or f[2] ~= execution then
    let_go(id, execution, origin)
    return 'gone'
  end
  if redis.call('EXISTS', key .. ':dependents') == 1 then return 'dependents' end
  redis.call('HSET', key, 'status', 'finished', 'ended_at', now)
  redis.call('XADD', 'rq:results:' .. id, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', worker,
             'return_value', result, 'execution_id', execution, 'execution_started_at', began_s,
             'execution_ended_at', now_s)
  local expires = '+inf'
  if tonumber(ttl) > 0 then
    expires = now_s + ttl
    redis.call('EXPIRE', 'rq:results:' .. id, ttl)
    redis.call('EXPIRE', key, ttl)
    redis.call('EXPIRE', 'slotline:events:' .. id, math.max(60, ttl))  -- from the same moment, however late that is
    redis.call('EXPIRE', 'rq:job::' .. id .. ':dependencies', ttl)  -- RQ writes two colons here
  else
    redis.call('PERSIST', 'rq:results:' .. id)
  end
  redis.call('ZADD', 'rq:finished:' .. origin, expires, id)
  let_go(id, execution, origin)
  done, worked_s = done + 1, worked_s + math.max(0, now_s - began_s)
  return 'ok'
end

local outcomes = {}
for i = 4, #ARGV, 6 do
  outcomes[#outcomes + 1] = record(unpack(ARGV, i, i + 5))
end
if done > 0 then
  redis.call('HINCRBY', KEYS[2], 'successful_job_count', done)
  redis.call('HINCRBYFLOAT', KEYS[2], 'total_working_time', worked_s)
end
return outcomes
