-- End a job that no worker has: write its terminal event and tell whoever wants to know.
-- status: what the API calls it; data: of the event, as JSON; ttl: seconds to keep job and log (below 0: for ever)
-- uses webhook
local function end_waiting(job, log, id, status, data, ttl)
  local f = redis.call('HMGET', job, 'sl_end', 'sl_notify', 'sl_webhook')
  -- Queued again after its end by RQ's own ways: the log is that of its last life, and a log has one end.
  if f[1] then redis.call('DEL', log) end
  redis.call('HSET', job, 'sl_end', status)
  local name = status == 'failed' and 'failed' or 'done'
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
  local at = (#last > 0 and string.match(last[1][1], '^%d+') or '0') .. '-*'
  at = redis.call('XADD', log, at, 'event', name, 'data', data)
  redis.call('PUBLISH', log, '{"event":"' .. name .. '","id":"' .. at .. '","data":' .. data .. '}')
  if f[2] then
    redis.call('RPUSH', f[2], id)
    redis.call('EXPIRE', f[2], 86400)  -- its owner may be gone for good; one that comes back looks at all its jobs
  end
  if f[3] then announce(job, f[3], 'job.' .. status, data) end
  if tonumber(ttl) > 0 then
    redis.call('EXPIRE', log, math.max(60, ttl))
    redis.call('EXPIRE', job, ttl)
    redis.call('EXPIRE', job .. ':dependents', ttl)
    redis.call('EXPIRE', 'rq:job::' .. id .. ':dependencies', ttl)  -- RQ writes two colons here
  end
end

-- Tokens in the log of what the job has said in this life.
local function logged_tokens(job, log)
  local last = not redis.call('HGET', job, 'sl_end') and redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1) or {}
  return #last > 0 and tonumber(string.match(last[1][1], '^%d+')) or 0
end
