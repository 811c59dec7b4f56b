-- The commit point of one or more jobs: append the terminal event, once, if the caller still owns the job and
-- nobody cancelled it.
-- KEYS: job, log of each job in turn
-- ARGV: for each job: execution id, status to end with, number of tokens, event name, data as JSON, ttl of the log in s,
--       data of a last token event or empty, tokens that the log has to have
-- Returns for each job ok, gone (no such job), lost (another owner), ended (already committed), cancelled (commit as
-- that) or behind (its log has fewer tokens, as in a Redis that came back without its last seconds).
-- uses webhook
local function say(log, at, name, data)
  local id = redis.call('XADD', log, at, 'event', name, 'data', data)
  redis.call('PUBLISH', log, '{"event":"' .. name .. '","id":"' .. id .. '","data":' .. data .. '}')
end
local function commit(job, log, execution, status, tokens, name, data, ttl, tail, needed)
  local f = redis.call('HMGET', job, 'status', 'sl_exec', 'sl_end', 'sl_cancel', 'sl_notify', 'sl_webhook')
  if not f[1] then return 'gone' end
  if f[2] ~= execution then return 'lost' end
  if f[3] then return 'ended' end
  local cancelled = f[4] or f[1] == 'canceled' or f[1] == 'stopped'
  if cancelled and status ~= 'cancelled' then return 'cancelled' end
  -- The log may be longer than the caller knows: a job that is taken up again can end before a token of its own.
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
  local logged = #last > 0 and tonumber(string.match(last[1][1], '^%d+')) or 0
  if logged < tonumber(needed) then return 'behind' end
  -- Text that was held back is given out with the end: one that is lost before its commit may come to end elsewhere.
  if tail ~= '' and logged < tonumber(tokens) then say(log, tokens .. '-0', 'token', tail) end
  say(log, math.max(tonumber(tokens), logged) .. '-*', name, data)
  redis.call('EXPIRE', log, ttl)
  redis.call('HSET', job, 'sl_end', status)
  if f[5] then
    redis.call('RPUSH', f[5], string.sub(job, 8))  -- behind `rq:job:`
    redis.call('EXPIRE', f[5], 86400)  -- its owner may be gone for good; one that comes back looks at all its jobs
  end
  if f[6] then announce(job, f[6], 'job.' .. status, data) end
  return 'ok'
end
local outcomes = {}
for j = 1, #KEYS / 2 do
  local a = 8 * (j - 1)
  outcomes[j] = commit(KEYS[2 * j - 1], KEYS[2 * j], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5],
                       ARGV[a + 6], ARGV[a + 7], ARGV[a + 8])
end
return outcomes
