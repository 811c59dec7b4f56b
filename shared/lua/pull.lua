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
    local f = redis.call('HMGET', key, 'status', 'origin', 'sl_end', 'sl_cancel', 'created_at')
    local waits = f[1] == 'queued'
    if waits and f[3] == 'cancelled' and f[4] == f[5] and redis.call('ZSCORE', 'rq:canceled:' .. f[2], id) then
      -- RQ's scheduler read the job before it was cancelled and queued it after: it stays cancelled. One that was
      -- requeued since is not in that registry any more, one enqueued anew has another time of creation.
      redis.call('HSET', key, 'status', 'canceled')
      waits = false
    end
    -- An id whose job was deleted, cancelled or already runs is only dropped.
    if waits then
      if f[3] then
        -- Queued again after its end by RQ's own ways: it runs from the start.
        redis.call('DEL', 'slotline:events:' .. id)
        redis.call('HDEL', key, 'sl_end', 'sl_cancel')
      end
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
