-- Take jobs into a worker's held list, most urgent first, and register their executions with RQ.
-- KEYS: held list, jobs index, live queues of the model and of `default`, workers of the model with a free slot, workers
--       that may hold jobs, then the queues of each priority in turn
-- ARGV: worker, what execution ids begin with, now as RQ writes it, now in s, when the registrations run out and how
--       long that is, one age and two ages before now as RQ writes it, whether a job may be taken before its time (1),
--       tokens that a job is reckoned at, free slots (below 0: the worker does not take part in that) and for how many
--       ms others may rely on them, after how many crashes a job runs alone,
--       then for each priority, most urgent first: its level, room, number of queues, tokens that each is owed (falling)
-- Nothing is taken while workers are suspended (`rq suspend`), nor while a server that has just come (back) may not know
-- all that workers hold (`settle.lua`).
-- Returns {{id, execution id, rank, 1 if its web process is gone, {field, value, …}} of each job, the queues in which
-- jobs are left, number of live queues, 1 if some are left to workers with free slots}.
local worker, prefix, now, now_s, expires, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local old, lends, quantum = {ARGV[7], ARGV[8]}, ARGV[9] == '1', tonumber(ARGV[10])
local live = redis.call('SCARD', KEYS[3]) + redis.call('SCARD', KEYS[4])
if redis.call('EXISTS', 'rq:suspended', 'slotline:settling') > 0 then return {{}, {}, live, 0} end
local known_run = redis.call('GET', 'slotline:run')
if known_run and known_run ~= string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') then return {{}, {}, live, 0} end
local free, now_ms = tonumber(ARGV[11]), math.floor(now_s * 1000)
local others = 0
if free >= 0 then
  redis.call('ZREM', KEYS[5], worker)
  others = redis.call('ZCOUNT', KEYS[5], now_ms, '+inf')
end

local lines, taken, alone = {}, {}, false
local k, a = 7, 14
while ARGV[a] do
  local line = {level = tonumber(ARGV[a]), room = tonumber(ARGV[a + 1])}
  for i = 1, tonumber(ARGV[a + 2]) do
    line[i] = {key = KEYS[k], credit = tonumber(ARGV[a + 2 + i]), waiting = redis.call('LLEN', KEYS[k])}
    k = k + 1
  end
  if others > 0 and line.room > free then
    -- It would have to displace somebody, and another worker would not.
    line.room, line.leaves = free, true
  end
  a = a + 3 + #line
  lines[#lines + 1] = line
end

local function register(id, origin, execution)
  local name = id .. ':' .. execution
  redis.call('HSET', 'rq:execution:' .. name, 'id', execution, 'job_id', id, 'created_at', now_s,
             'last_heartbeat', now_s, 'worker_name', worker)
  redis.call('EXPIRE', 'rq:execution:' .. name, ttl)
  redis.call('ZADD', 'rq:executions:' .. id, expires, execution)
  redis.call('EXPIRE', 'rq:executions:' .. id, ttl)
  redis.call('ZADD', 'rq:wip:' .. origin, expires, name)
  redis.call('SADD', 'rq:worker:' .. worker .. ':executions', name)
end

-- Take the next job of a queue at a rank; false if none was left.
local function take(queue, rank)
  while queue.waiting > 0 do
    local id = redis.call('LPOP', queue.key)
    queue.waiting = queue.waiting - 1
    local key = 'rq:job:' .. id
    local f = redis.call('HMGET', key, 'status', 'origin', 'sl_end', 'sl_cancel', 'created_at', 'sl_bound',
                         'sl_crashes')
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
        redis.call('HDEL', key, 'sl_end', 'sl_cancel', 'sl_used_ms', 'sl_prompt_ms', 'sl_crashes', 'sl_crash_at')
      end
      local execution = prefix .. '-' .. #taken
      redis.call('RPUSH', KEYS[1], id)
      redis.call('HSET', key, 'status', 'started', 'started_at', now, 'last_heartbeat', now,
                 'worker_name', worker, 'sl_exec', execution)
      redis.call('HINCRBY', key, 'sl_attempts', 1)
      redis.call('PERSIST', key)
      redis.call('ZADD', KEYS[2], 'NX', now_ms, id)
      register(id, f[2] or '', execution)
      local orphaned = f[6] and redis.call('EXISTS', 'slotline:web:' .. f[6] .. ':lease') == 0
      taken[#taken + 1] = {id, execution, rank, orphaned and 1 or 0, redis.call('HGETALL', key)}
      queue.credit = queue.credit - quantum
      alone = not f[3] and tonumber(f[7] or 0) >= tonumber(ARGV[13])
      for _, line in ipairs(lines) do
        if alone then
          line.room = 0
        elseif line.level >= rank then
          line.room = line.room - 1
        end
      end
      return true
    end
  end
  return false
end

local function owed_most(line)
  local best
  for _, queue in ipairs(line) do
    if queue.waiting > 0 and (not best or queue.credit > best.credit) then best = queue end
  end
  return best
end

-- Since when the next job of a queue waits, as RQ writes it; nil if there is none. What no longer waits is dropped.
local function waits_since(queue)
  while queue.waiting > 0 do
    local f = redis.call('HMGET', 'rq:job:' .. redis.call('LINDEX', queue.key, 0), 'status', 'enqueued_at', 'created_at')
    if f[1] == 'queued' then return f[2] and f[2] ~= '' and f[2] or f[3] or nil end
    redis.call('LPOP', queue.key)
    queue.waiting = queue.waiting - 1
  end
end

-- The queue of a less urgent priority whose next job has waited longest of those that now rank with `line`. Of one
-- priority the first in its order that is so old, since age settles nothing among tenants.
local function aged_to(line)
  local best, since
  for _, other in ipairs(lines) do
    local limit = old[other.level - line.level]
    if limit and other.room > 0 then
      for _, queue in ipairs(other) do
        local at = waits_since(queue)
        if at and at < limit then  -- times of one form compare as text
          if not since or at < since then best, since = queue, at end
          break
        end
      end
    end
  end
  return best
end

for _, line in ipairs(lines) do
  if lends and line.room > 0 and owed_most(line) then
    local queue = aged_to(line)
    if queue and take(queue, line.level) then lends = false end
  end
  while line.room > 0 do
    local queue = owed_most(line)
    if not queue then break end
    take(queue, line.level)
  end
end

-- For what this worker has no room for, another one may have some.
local left, rung, leaves_some = {}, {}, 0
for _, line in ipairs(lines) do
  for _, queue in ipairs(line) do
    if queue.waiting > 0 then
      left[#left + 1] = queue.key
      if line.leaves then leaves_some = 1 end
      local bell = string.match(queue.key, '^rq:queue:([^:]+:[^:]+)')
      if bell and not rung[bell] then
        rung[bell] = true
        redis.call('LPUSH', 'slotline:doorbell:' .. bell, '1')
        redis.call('LTRIM', 'slotline:doorbell:' .. bell, 0, 0)
      end
    end
  end
end
if #taken > 0 then
  -- Whoever looks for dead workers has to know of everybody that holds something.
  redis.call('SADD', KEYS[6], worker)
end
if free > #taken and not alone then
  redis.call('ZADD', KEYS[5], now_ms + ARGV[12], worker)
  redis.call('EXPIRE', KEYS[5], 60)
end
return {taken, left, live, leaves_some}
