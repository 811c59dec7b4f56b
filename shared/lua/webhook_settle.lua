-- Note what came of an attempt to send a webhook, and when the next one is due.
-- KEYS: outbox, webhook
-- ARGV: id, number of the attempt, attempt as JSON, delivered, failed (not to be tried again) or pending, wait before
--       the next attempt in ms, how long it is tried in ms
-- Returns the state it is in, or gone where nobody waits for it any more.
local f = redis.call('HMGET', KEYS[2], 'subject', 'tries', 'log', 'first_ms')
if not f[1] then return 'gone' end
local id, state = ARGV[1], ARGV[4]
local log = (f[3] and f[3] .. ',' or '') .. ARGV[3]
local now = redis.call('TIME')
local due = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[5]
if state == 'pending' and f[2] ~= ARGV[2] then
  -- The claim ran out and another sender has it: it says when the next attempt is.
  due = tonumber(redis.call('ZSCORE', KEYS[1], id)) or due
elseif state == 'pending' and due > f[4] + ARGV[6] then
  state = 'failed'
end
local shown = 'null'
if state == 'pending' then
  redis.call('HSET', KEYS[2], 'log', log)
  redis.call('ZADD', KEYS[1], due, id)
  shown = string.format('%.3f', due / 1000)
else
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[1], id)
end
local ids = redis.call('HGET', f[1], 'sl_webhook_ids')
if ids and string.sub(ids, -#id) == id then
  redis.call('HSET', f[1], 'sl_webhook_log',
             '{"status":"' .. state .. '","attempts":[' .. log .. '],"next_attempt_at":' .. shown .. '}')
end
return state
