-- Become the runner of an open batch that has none.
-- KEYS: batch, lease, open batches
-- ARGV: id, owner, lease in ms
-- Returns the fence, or 0 where there is nothing to take.
if redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 0 or redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if not redis.call('SET', KEYS[2], ARGV[2], 'NX', 'PX', ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[2])
return redis.call('HINCRBY', KEYS[1], 'fence', 1)
