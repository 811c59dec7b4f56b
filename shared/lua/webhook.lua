-- Put a webhook in the outbox, due at once, together with the end that it tells of.
-- subject: hash of the job or batch; data: what its body is made of. The same end has the same id.
local function announce(subject, url, event, data)
  local id = 'msg_' .. redis.sha1hex(subject .. data)
  local now = redis.call('TIME')
  redis.call('HSET', 'slotline:webhook:' .. id, 'subject', subject, 'url', url, 'type', event, 'at', now[1],
             'data', data)
  redis.call('ZADD', 'slotline:webhooks', now[1] * 1000 + math.floor(now[2] / 1000), id)
  -- A job that is run again has a webhook for each end; it shows the last one.
  local ids = redis.call('HGET', subject, 'sl_webhook_ids')
  redis.call('HSET', subject, 'sl_webhook_ids', ids and ids .. ' ' .. id or id)
  redis.call('HDEL', subject, 'sl_webhook_log')
end
