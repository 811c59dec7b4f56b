-- How many jobs are ahead of some that wait, without a look through their queues; their readers are told if asked.
-- KEYS: job of each
-- ARGV: priorities, most urgent first, with spaces between; for how many ms a job is not told of again (0: tell nobody);
--       then for each job: free slots of its model, seconds that its workers take for a job (empty: not known)
-- Returns for each job the number of those ahead; nil where it does not wait in a queue, or its place is not known.
local rank = {}
for priority in string.gmatch(ARGV[1], '%S+') do
  rank[#rank + 1] = priority
  rank[priority] = #rank
end
local silent_ms = tonumber(ARGV[2])

-- A ticket is good for the time when its job was queued. RQ's own tools may have queued the job again.
local function ticket_of(stored, enqueued_at)
  local number, at = string.match(stored or '', '^(%d+) (.*)$')
  return at == enqueued_at and tonumber(number) or nil
end

local function ticket_at(queue, index)
  local id = redis.call('LINDEX', queue, index)
  return id and ticket_of(unpack(redis.call('HMGET', 'rq:job:' .. id, 'sl_ticket', 'enqueued_at')))
end

-- What is the same for all jobs of a queue: how many wait, the first and the last ticket, and jobs of more urgency.
local lines = {}
local function line_of(origin)
  if lines[origin] then return lines[origin] end
  local queue = 'rq:queue:' .. origin
  local line = {waiting = redis.call('LLEN', queue), urgent = 0}
  line.first, line.last = ticket_at(queue, 0), ticket_at(queue, -1)
  -- What RQ's own tools queued has no ticket. At an end of the queue it counts as if all others stood close together.
  if not line.last then
    local newest = tonumber(redis.call('GET', 'slotline:tickets:' .. origin) or nil)
    line.last = line.first and math.max(line.first + line.waiting - 1, newest or 0) or newest
  end
  line.first = line.first or line.last and line.last - line.waiting + 1
  local model, priority = string.match(origin, '^([^:]+):([^:]+):[^:]+$')
  if model and rank[priority] then
    for _, name in ipairs(redis.call('SMEMBERS', 'slotline:queues:' .. model)) do
      local other = string.match(name, '^[^:]+:([^:]+):')
      if other and rank[other] and rank[other] < rank[priority] then
        line.urgent = line.urgent + redis.call('LLEN', 'rq:queue:' .. name)
      end
    end
  end
  lines[origin] = line
  return line
end

-- Tickets are in the order of the queue. Numbers are missing where jobs left it out of turn: as if evenly spread.
local function ahead_of(ticket, line)
  local others, first, last = line.waiting - 1, line.first, line.last
  if others <= 0 then return line.urgent end
  if not (ticket and first and last) then return nil end
  if ticket <= first then return line.urgent end
  if ticket >= last then return line.urgent + others end
  return line.urgent + math.floor((ticket - first) * others / (last - first) + 0.5)
end

local function say(id, ahead, idle, job_s)
  if not redis.call('SET', 'slotline:told:' .. id, '1', 'NX', 'PX', silent_ms) then return end
  local estimate = 'null'
  if ahead and job_s ~= '' then estimate = string.format('%.1f', math.max(0, ahead + 1 - idle) * job_s) end
  redis.call('PUBLISH', 'slotline:events:' .. id, '{"event":"queued","id":"0-0","data":{"ahead":' .. (ahead or 'null')
             .. ',"estimate_s":' .. estimate .. '}}')
end

local found = {}
for i, key in ipairs(KEYS) do
  local f = redis.call('HMGET', key, 'status', 'origin', 'sl_ticket', 'enqueued_at')
  local waits = f[1] == 'queued' and f[2]
  local ahead = waits and ahead_of(ticket_of(f[3], f[4]), line_of(f[2])) or false
  if waits and silent_ms > 0 then
    say(string.sub(key, 8), ahead, tonumber(ARGV[2 * i + 1]), ARGV[2 * i + 2])  -- behind `rq:job:`
  end
  found[i] = ahead
end
return found
