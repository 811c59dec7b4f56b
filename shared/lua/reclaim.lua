-- Give back what a dead worker held. A worker is dead when its lease has run out, or when its parent has seen it end.
-- KEYS: lease, held list, workers, held list of the caller
-- ARGV: name of the dead worker, name of the caller (empty: it cannot record ends with RQ), whether its parent has seen it
--       end (1), crashes that a job may not come to, then the executions that it worked on when it died, where that is known
-- Returns {ids that went back; ids whose end was committed but not recorded, which the caller now holds; id, execution id
-- and number of crashes of each job that has come to too many, which the dead one goes on holding until its end is
-- committed; those that went back although they are to be cancelled}.
local dead, caller, seen, limit = ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
if seen then
  redis.call('DEL', KEYS[1])
elseif redis.call('EXISTS', KEYS[1]) == 1 then
  return {{}, {}, {}, {}}
end
local blamed = {}
for i = 5, #ARGV do blamed[ARGV[i]] = true end

-- How many times in a row the job was at work when its process died, without a token gained in between.
local function crashes_of(id, key, execution)
  local f = redis.call('HMGET', key, 'sl_crashes', 'sl_crash_at')
  local crashes = tonumber(f[1]) or 0
  if not blamed[execution] then return crashes end
  local last = redis.call('XREVRANGE', 'slotline:events:' .. id, '+', '-', 'COUNT', 1)
  local tokens = #last > 0 and tonumber(string.match(last[1][1], '^%d+')) or 0
  crashes = tokens > (tonumber(f[2]) or 0) and 0 or crashes + 1
  redis.call('HSET', key, 'sl_crashes', crashes, 'sl_crash_at', tokens)
  return crashes
end

local function unregister(id, origin, execution)
  local name = id .. ':' .. execution
  redis.call('ZREM', 'rq:wip:' .. origin, name)
  redis.call('ZREM', 'rq:executions:' .. id, execution)
  redis.call('DEL', 'rq:execution:' .. name)
  redis.call('SREM', 'rq:worker:' .. dead .. ':executions', name)
end

local queued, committed, doomed, cancelled, met = {}, {}, {}, {}, {}
local held = redis.call('LRANGE', KEYS[2], 0, -1)
redis.call('DEL', KEYS[2])
redis.call('SREM', 'slotline:settling', dead)
-- From the last to the first, so that they keep their order at the front of the queue.
for i = #held, 1, -1 do
  local id = held[i]
  local key = 'rq:job:' .. id
  local f = redis.call('HMGET', key, 'status', 'worker_name', 'origin', 'sl_end', 'sl_exec', 'sl_cancel')
  local origin, execution = f[3] or '', f[5] or ''
  if f[1] == 'started' and f[2] == dead and not met[id] then
    met[id] = true
    local crashes = f[4] and 0 or crashes_of(id, key, execution)
    if f[4] and caller ~= '' then
      unregister(id, origin, execution)
      redis.call('HSET', key, 'worker_name', caller)
      redis.call('RPUSH', KEYS[4], id)
      committed[#committed + 1] = id
    elseif f[4] or (crashes >= limit and not f[6]) then
      redis.call('LPUSH', KEYS[2], id)
      if not f[4] then doomed[#doomed + 1] = {id, execution, crashes} end
    else
      unregister(id, origin, execution)
      redis.call('HSET', key, 'status', 'queued')
      redis.call('HDEL', key, 'sl_exec')
      redis.call('LPUSH', 'rq:queue:' .. origin, id)
      local bell = string.match(origin, '^[^:]+:[^:]+')
      if bell then
        redis.call('LPUSH', 'slotline:doorbell:' .. bell, '1')
        redis.call('LTRIM', 'slotline:doorbell:' .. bell, 0, 0)
      end
      queued[#queued + 1] = id
      if f[6] then cancelled[#cancelled + 1] = id end
    end
  end
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('SADD', KEYS[3], dead)
else
  redis.call('SREM', KEYS[3], dead)
end
return {queued, committed, doomed, cancelled}
