-- Give pulled jobs back to the front of their queues, in their order, if the caller still owns them.
-- KEYS: held list
-- ARGV: worker, then for each job, in the order they should come out again: id, execution id, ms in slots so far, ms
--       of it until the first token (both empty where they are not known better than the last note of them)
-- Returns the ids of those that went back although they are to be cancelled.
local cancelled = {}
for i = #ARGV - 3, 2, -4 do
  local id, execution = ARGV[i], ARGV[i + 1]
  local key, name = 'rq:job:' .. id, id .. ':' .. execution
  local f = redis.call('HMGET', key, 'sl_exec', 'status', 'origin', 'sl_end', 'sl_cancel')
  redis.call('LREM', KEYS[1], 1, id)
  redis.call('DEL', 'rq:execution:' .. name)
  redis.call('ZREM', 'rq:executions:' .. id, execution)
  redis.call('SREM', 'rq:worker:' .. ARGV[1] .. ':executions', name)
  if f[3] then redis.call('ZREM', 'rq:wip:' .. f[3], name) end
  if f[1] == execution and f[2] == 'started' and not f[4] then
    redis.call('HSET', key, 'status', 'queued')
    redis.call('HDEL', key, 'sl_exec')
    if ARGV[i + 2] ~= '' then redis.call('HSET', key, 'sl_used_ms', ARGV[i + 2]) end
    if ARGV[i + 3] ~= '' then redis.call('HSET', key, 'sl_prompt_ms', ARGV[i + 3]) end
    redis.call('LPUSH', 'rq:queue:' .. f[3], id)
    local bell = string.match(f[3], '^[^:]+:[^:]+')
    if bell then
      redis.call('LPUSH', 'slotline:doorbell:' .. bell, '1')
      redis.call('LTRIM', 'slotline:doorbell:' .. bell, 0, 0)
    end
    if f[5] then cancelled[#cancelled + 1] = id end
  end
end
return cancelled
