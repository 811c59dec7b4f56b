-- Append events of one or more jobs to their logs and publish them, refused for jobs with another owner.
-- KEYS: job, log of each job in turn
-- ARGV: execution id of each job in turn, then for each event: number of its job, log id, event name, data as JSON
-- Returns the numbers (from 1) of the jobs that have another owner now.
local jobs = #KEYS / 2
local owned, refused = {}, {}
for j = 1, jobs do
  owned[j] = redis.call('HGET', KEYS[2 * j - 1], 'sl_exec') == ARGV[j]
  if not owned[j] then refused[#refused + 1] = j end
end
for i = jobs + 1, #ARGV, 4 do
  local j = tonumber(ARGV[i])
  if owned[j] then
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
