-- Take up to k jobs, most urgent queue first, into a worker's held list.
-- KEYS: held list, jobs index, queue…
-- ARGV: k, worker name, now as RQ writes it, now_ms, an execution id for each job…
-- Nothing is taken while workers are suspended (`rq suspend`).
-- Returns {id, execution id, queue key, {field, value, …}} for each job taken.
local k, worker, now, now_ms = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
if redis.call('EXISTS', 'rq:suspended') == 1 then return {} end
local taken = {}
for q = 3, #KEYS do
  while #taken < k do
    local id = redis.call('LPOP', KEYS[q])
    if not id then break end
    local key = 'rq:job:' .. id
    -- An id whose job was deleted, cancelled or already runs is only dropped.
    if redis.call('HGET', key, 'status') == 'queued' then
      local execution = ARGV[5 + #taken]
      redis.call('RPUSH', KEYS[1], id)
      redis.call('HSET', key, 'status', 'started', 'started_at', now, 'last_heartbeat', now,
                 'worker_name', worker, 'sl_exec', execution)
      redis.call('HINCRBY', key, 'sl_attempts', 1)
      redis.call('PERSIST', key)
      redis.call('ZADD', KEYS[2], 'NX', now_ms, id)
      taken[#taken + 1] = {id, execution, KEYS[q], redis.call('HGETALL', key)}
    end
  end
end
return taken
