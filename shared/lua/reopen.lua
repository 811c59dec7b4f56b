-- Let an ended job run again from the start: its log begins anew.
-- KEYS: job, log
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[1], 'sl_end', 'sl_cancel')
return 1
