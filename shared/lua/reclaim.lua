-- Give back what a dead worker held. A worker is dead when its lease has run out.
-- KEYS: lease, held list, workers, held list of the caller
-- ARGV: name of the dead worker, name of the caller
-- Returns {ids that went back, ids whose end was committed but not recorded}; the caller now holds the latter.
if redis.call('EXISTS', KEYS[1]) == 1 then return {{}, {}} end
local back, committed = {}, {}
for _, id in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do table.insert(back, 1, id) end
local queued = {}
for _, id in ipairs(back) do
  local key = 'rq:job:' .. id
  local f = redis.call('HMGET', key, 'status', 'worker_name', 'origin', 'sl_end', 'sl_exec')
  if f[1] == 'started' and f[2] == ARGV[1] then
    local execution = id .. ':' .. (f[5] or '')
    redis.call('ZREM', 'rq:wip:' .. f[3], execution)
    redis.call('ZREM', 'rq:executions:' .. id, f[5] or '')
    redis.call('DEL', 'rq:execution:' .. execution)
    if f[4] then
      redis.call('HSET', key, 'worker_name', ARGV[2])
      redis.call('RPUSH', KEYS[4], id)
      committed[#committed + 1] = id
    else
      redis.call('HSET', key, 'status', 'queued')
      redis.call('HDEL', key, 'sl_exec')
      redis.call('LPUSH', 'rq:queue:' .. f[3], id)
      local bell = string.match(f[3], '^[^:]+:[^:]+')
      if bell then
        redis.call('LPUSH', 'slotline:doorbell:' .. bell, '1')
        redis.call('LTRIM', 'slotline:doorbell:' .. bell, 0, 0)
      end
      queued[#queued + 1] = id
    end
  end
end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[3], ARGV[1])
return {queued, committed}
