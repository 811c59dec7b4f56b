-- Store a job and put it where it waits, all or nothing.
-- KEYS: job, queue, jobs index, model's live queues, doorbell, model card, idempotency key,
--       scheduled registry, deferred registry, rq:queues, jobs by their deadlines
-- ARGV: id, fingerprint, now_ms, place (queue|schedule|defer), run_at, queue name, idempotency ttl (0: none),
--       when it may have waited too long in s (empty: never), number of dependencies, dependency ids…, then field,
--       value, …
-- Returns {outcome, detail}.
local id, print, now_ms, place, run_at = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local queue_name, idempotency_ttl, due, n_deps = ARGV[6], tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9])

local known = idempotency_ttl > 0 and redis.call('GET', KEYS[7]) or id
-- The key may outlive its job, so the id counts even where the key is known.
for _, existing in ipairs({known, id}) do
  local stored = redis.call('HGET', 'rq:job:' .. existing, 'sl_print')
  if stored == print then return {'exists', existing} end
  if stored or redis.call('EXISTS', 'rq:job:' .. existing) == 1 then return {'conflict', existing} end
end

local waits = false
for i = 1, n_deps do
  local dep = ARGV[9 + i]
  local f = redis.call('HMGET', 'rq:job:' .. dep, 'status', 'sl_end', 'sl_cancel')
  local status = f[1]
  if not status then return {'no_dependency', dep} end
  -- A job that still runs may have its end committed already, or be about to be cancelled.
  local doomed = status == 'started' and (f[2] == 'failed' or f[2] == 'cancelled' or (f[3] and not f[2]))
  if doomed or status == 'failed' or status == 'canceled' or status == 'stopped' then
    return {'dead_dependency', dep}
  end
  if status ~= 'finished' then waits = true end
end
if place == 'defer' and not waits then place = 'queue' end

local limit = tonumber(redis.call('HGET', KEYS[6], 'max_queue') or '0')
if place == 'queue' and limit > 0 then
  local waiting = 0
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    waiting = waiting + redis.call('LLEN', 'rq:queue:' .. name)
  end
  if waiting >= limit then return {'full', tostring(limit)} end
end

local fields = {}
for i = 10 + n_deps, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('HSET', KEYS[1], 'sl_print', print)
redis.call('ZADD', KEYS[3], now_ms, id)
redis.call('SADD', KEYS[4], queue_name)
redis.call('SADD', KEYS[10], KEYS[2])
if due ~= '' then redis.call('ZADD', KEYS[11], due, id) end
if idempotency_ttl > 0 then
  redis.call('SET', KEYS[7], id, 'EX', idempotency_ttl)
  redis.call('HSET', KEYS[1], 'sl_idempotency', KEYS[7])
end

if place == 'schedule' then
  redis.call('HSET', KEYS[1], 'status', 'scheduled')
  redis.call('ZADD', KEYS[8], run_at, id)
elseif place == 'defer' then
  redis.call('HSET', KEYS[1], 'status', 'deferred')
  redis.call('ZADD', KEYS[9], math.floor(tonumber(now_ms) / 1000), id)
  for i = 1, n_deps do
    redis.call('SADD', 'rq:job:' .. ARGV[9 + i] .. ':dependents', id)
    redis.call('SADD', 'rq:job::' .. id .. ':dependencies', ARGV[9 + i])  -- RQ writes two colons here
  end
else
  local ticket = redis.call('INCR', 'slotline:tickets:' .. queue_name)
  local enqueued_at = redis.call('HGET', KEYS[1], 'enqueued_at') or ''
  redis.call('HSET', KEYS[1], 'status', 'queued', 'sl_ticket', string.format('%.0f ', ticket) .. enqueued_at)
  redis.call('RPUSH', KEYS[2], id)
  redis.call('LPUSH', KEYS[5], '1')
  redis.call('LTRIM', KEYS[5], 0, 0)
end
return {'created', id}
