-- Store a batch and open it, if its input file is there.
-- KEYS: batch, index, open batches, input file, users of the input file
-- ARGV: id, now in ms, now in s, fingerprint, then field, value, …
-- Returns created, exists (the same batch), conflict (the id is that of another), no_file or wrong_purpose.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return redis.call('HGET', KEYS[1], 'print') == ARGV[4] and 'exists' or 'conflict'
end
local f = redis.call('HMGET', KEYS[4], 'purpose', 'expires_at')
local expired = f[2] and tonumber(f[2]) <= tonumber(ARGV[3]) and redis.call('SCARD', KEYS[5]) == 0
if not f[1] or expired then return 'no_file' end
if f[1] ~= 'batch' then return 'wrong_purpose' end
local fields = {}
for i = 5, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', KEYS[1], 'status', 'validating', 'print', ARGV[4], unpack(fields))
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('SADD', KEYS[5], ARGV[1])
return 'created'
