-- End a batch: its record, its bitmaps and its results expire from now on, and its input may be deleted.
-- KEYS: batch, done bitmap, failed bitmap, lease, open batches, files by expiry
-- ARGV: id, fence, state to end in, states it may be in with commas around each, now in s, ttl in s,
--       errors as JSON (or empty)
-- Returns missing, lost, unfinished (a line has no row), the state it ended in, or the state that does not allow it.
-- uses webhook
local f = redis.call('HMGET', KEYS[1], 'status', 'fence', 'total', 'completed', 'failed', 'input_file_id',
                     'output_file_id', 'error_file_id', 'sl_webhook')
if not f[1] then return 'missing' end
if f[2] ~= ARGV[2] then return 'lost' end
if not string.find(ARGV[4], ',' .. f[1] .. ',', 1, true) then return f[1] end
if (tonumber(f[4]) or 0) + (tonumber(f[5]) or 0) < (tonumber(f[3]) or 0) then return 'unfinished' end
-- Who asked for a cancel was told `cancelling`, and nothing else may follow that.
local status = f[1] == 'cancelling' and 'cancelled' or ARGV[3]
redis.call('HDEL', KEYS[1], 'paused', 'owner')
redis.call('HSET', KEYS[1], 'status', status, status .. '_at', ARGV[5])
-- Nobody with this fence may write any more.
redis.call('HINCRBY', KEYS[1], 'fence', 1)
if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'errors', ARGV[7]) end
if f[9] then announce(KEYS[1], f[9], 'batch.' .. status, cjson.encode(redis.call('HGETALL', KEYS[1]))) end
redis.call('SREM', KEYS[5], ARGV[1])
redis.call('DEL', KEYS[4])
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ARGV[6]) end
for i = 6, 8 do
  if f[i] then redis.call('SREM', 'slotline:file:' .. f[i] .. ':batches', ARGV[1]) end
end
for i = 7, 8 do
  local key = 'slotline:file:' .. (f[i] or '')
  if f[i] and redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'expires_at') == 0 then
    local at = tonumber(ARGV[5]) + tonumber(ARGV[6])
    redis.call('HSET', key, 'expires_at', at)
    redis.call('ZADD', KEYS[6], at, f[i])
  end
end
return status
