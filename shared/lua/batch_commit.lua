-- Make parts of a batch's results known and count their lines, all or nothing.
-- KEYS: batch, done bitmap, failed bitmap, files index, files by expiry, trash
-- ARGV: fence, now in s, now in ms, batch id, id for a new output file, id for a new error file, lines as JSON
--       (for each part its line numbers), then usage_input, usage_output, usage_cached, usage_reasoning, then for each
--       part: output or error, name of the object, bytes, its entry in the file's list
-- Returns missing, lost, doubled (a line has a row already), beyond (more lines than the total), or the batch's state.
local f = redis.call('HMGET', KEYS[1], 'fence', 'status', 'total', 'completed', 'failed')
if not f[2] then return 'missing' end
if f[1] ~= ARGV[1] then return 'lost' end
local fresh = {output = ARGV[5], error = ARGV[6]}
local numbers = cjson.decode(ARGV[7])

local first = redis.call('HGET', KEYS[1], ARGV[12] .. '_file_id')
if first and redis.call('LPOS', 'slotline:file:' .. first .. ':parts', ARGV[15]) then return f[2] end

local seen, lines = {}, {output = 0, error = 0}
for p, list in ipairs(numbers) do
  local which = ARGV[8 + 4 * p]
  lines[which] = lines[which] + #list
  for _, n in ipairs(list) do
    if seen[n] or redis.call('GETBIT', KEYS[2], n) == 1 then return 'doubled' end
    seen[n] = true
  end
end
local through = (tonumber(f[4]) or 0) + (tonumber(f[5]) or 0) + lines.output + lines.error
if through > (tonumber(f[3]) or 0) then return 'beyond' end

-- The file of this kind; made by its first part, also where an earlier one was deleted.
local function file_of(which)
  local field = which .. '_file_id'
  local id = redis.call('HGET', KEYS[1], field)
  if id and redis.call('EXISTS', 'slotline:file:' .. id) == 1 then return id end
  id = fresh[which]
  redis.call('HSET', KEYS[1], field, id)
  local key = 'slotline:file:' .. id
  redis.call('HSET', key, 'filename', ARGV[4] .. '_' .. which .. '.jsonl', 'purpose', 'batch_output',
             'created_at', ARGV[2], 'bytes', '0')
  redis.call('ZADD', KEYS[4], ARGV[3], id)
  redis.call('SADD', key .. ':batches', ARGV[4])
  local ttl_s = redis.call('HGET', KEYS[1], 'output_ttl_s')
  if ttl_s then
    local at = tonumber(ARGV[2]) + tonumber(ttl_s)
    redis.call('HSET', key, 'expires_at', at)
    redis.call('ZADD', KEYS[5], at, id)
  end
  return id
end

for p, list in ipairs(numbers) do
  local a = 8 + 4 * p
  local which, name, bytes, entry = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  local id = file_of(which)
  redis.call('RPUSH', 'slotline:file:' .. id .. ':parts', entry)
  redis.call('HINCRBY', 'slotline:file:' .. id, 'bytes', bytes)
  redis.call('ZREM', KEYS[6], name)
  for _, n in ipairs(list) do
    redis.call('SETBIT', KEYS[2], n, 1)
    if which == 'error' then redis.call('SETBIT', KEYS[3], n, 1) end
  end
end
redis.call('HINCRBY', KEYS[1], 'completed', lines.output)
redis.call('HINCRBY', KEYS[1], 'failed', lines.error)
for i, field in ipairs({'usage_input', 'usage_output', 'usage_cached', 'usage_reasoning'}) do
  redis.call('HINCRBY', KEYS[1], field, ARGV[7 + i])
end
return f[2]
