-- Remove every trace of jobs that are over; with `waiting`, of jobs that are queued instead.
-- KEYS: jobs index, set of jobs that are to be discarded
-- ARGV: over|waiting, job id…
-- Returns the ids that stay: neither, or over but still to be recorded by their worker, which would bring them back.
local wanted = {finished = true, failed = true, canceled = true, stopped = true}
if ARGV[1] == 'waiting' then wanted = {queued = true} end
local stay = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local key = 'rq:job:' .. id
  local f = redis.call('HMGET', key, 'status', 'origin')
  if f[1] and not wanted[f[1]] then
    stay[#stay + 1] = id
  else
    if f[1] == 'queued' then redis.call('LREM', 'rq:queue:' .. f[2], 0, id) end
    if f[2] then
      for _, registry in ipairs({'finished', 'failed', 'canceled'}) do
        redis.call('ZREM', 'rq:' .. registry .. ':' .. f[2], id)
      end
    end
    redis.call('DEL', key, key .. ':dependents', 'rq:job::' .. id .. ':dependencies', 'rq:results:' .. id,
               'rq:executions:' .. id, 'slotline:events:' .. id)
    redis.call('ZREM', KEYS[1], id)
    redis.call('SREM', KEYS[2], id)
  end
end
return stay
