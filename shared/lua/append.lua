-- Append events of one or more jobs to their logs and publish them, refused for jobs with another owner and where tokens
-- before them are missing, as in a Redis that came back without its last seconds.
-- KEYS: job, log of each job in turn
-- ARGV: execution id of each job in turn, then for each event: number of its job, log id (empty: it is only published),
--       event name, data as JSON
-- Returns the numbers (from 1) of the jobs whose events were refused.
local jobs = #KEYS / 2
local owned, refused, logged = {}, {}, {}
for j = 1, jobs do
  owned[j] = redis.call('HGET', KEYS[2 * j - 1], 'sl_exec') == ARGV[j]
  if not owned[j] then refused[#refused + 1] = j end
end
-- An event without an index gets its place here, so a call that is repeated after a lost reply would write it again.
local function is_there(log, at, name, data)
  local tokens = string.match(at, '^(%d+)%-%*$')
  local there = tokens and redis.call('XRANGE', log, tokens, tokens) or {}
  for i, entry in ipairs(there) do
    local fields = entry[2]
    if fields[2] == name and fields[4] == data and (i == #there or name == 'started') then return true end
  end
  return false
end
-- Whether the log has, or is about to have, all tokens before a place; how many it has is looked up once for each job.
local function joins(j, at)
  if not logged[j] then
    local last = redis.call('XREVRANGE', KEYS[2 * j], '+', '-', 'COUNT', 1)
    logged[j] = #last > 0 and tonumber(string.match(last[1][1], '^%d+')) or 0
  end
  local tokens, step = string.match(at, '^(%d+)%-(.+)$')
  local before = step == '0' and tokens - 1 or tonumber(tokens)
  if before > logged[j] then return false end
  if step == '0' then logged[j] = math.max(logged[j], tonumber(tokens)) end
  return true
end
for i = jobs + 1, #ARGV, 4 do
  local j = tonumber(ARGV[i])
  local is_logged = ARGV[i + 1] ~= ''
  if owned[j] and is_logged and not joins(j, ARGV[i + 1]) then
    owned[j] = false
    refused[#refused + 1] = j
  end
  if owned[j] and not is_logged then
    redis.call('PUBLISH', KEYS[2 * j], '{"event":"' .. ARGV[i + 2] .. '","id":"0-0","data":' .. ARGV[i + 3] .. '}')
  elseif owned[j] and not is_there(KEYS[2 * j], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]) then
    local log = KEYS[2 * j]
    local id = redis.pcall('XADD', log, ARGV[i + 1], 'event', ARGV[i + 2], 'data', ARGV[i + 3])
    if type(id) == 'string' then
      redis.call('PUBLISH', log, '{"event":"' .. ARGV[i + 2] .. '","id":"' .. id .. '","data":' .. ARGV[i + 3] .. '}')
    elseif not string.find(id.err, 'equal or smaller', 1, true) then
      -- Full, read-only, not a log: the caller has to try again. Only an index the log has already is success.
      return id
    end
  end
end
return refused
