-- Let an ended job run again: drop its terminal event so that its log can go on.
-- KEYS: job, log
-- Returns the number of terminal events dropped.
local dropped = 0
if redis.call('HEXISTS', KEYS[1], 'sl_end') == 1 then
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 4)) do
    if entry[2][2] == 'done' or entry[2][2] == 'failed' then
      dropped = dropped + redis.call('XDEL', KEYS[2], entry[1])
    end
  end
end
redis.call('PERSIST', KEYS[2])
redis.call('HDEL', KEYS[1], 'sl_end', 'sl_cancel')
return dropped
