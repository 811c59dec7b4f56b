-- Change fields of a batch in one of some states.
-- KEYS: batch
-- ARGV: fence (empty: the API asks), states it may be in with commas around each, field to remove (or empty),
--       then field, value, …
-- Returns missing, lost, or the state it was in; nothing is changed where that is none of the states.
local f = redis.call('HMGET', KEYS[1], 'status', 'fence')
if not f[1] then return 'missing' end
if ARGV[1] ~= '' and f[2] ~= ARGV[1] then return 'lost' end
if not string.find(ARGV[2], ',' .. f[1] .. ',', 1, true) then return f[1] end
if ARGV[3] ~= '' then redis.call('HDEL', KEYS[1], ARGV[3]) end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return f[1]
