-- Note how long jobs have been in slots so far, so that a worker that dies takes little of it with it.
-- KEYS: jobs
-- ARGV: for each job: execution id, ms in slots, ms of it until the first token (empty before that)
for j, key in ipairs(KEYS) do
  local a = 3 * (j - 1)
  local f = redis.call('HMGET', key, 'sl_exec', 'sl_end')
  if f[1] == ARGV[a + 1] and not f[2] then
    redis.call('HSET', key, 'sl_used_ms', ARGV[a + 2])
    if ARGV[a + 3] ~= '' then redis.call('HSET', key, 'sl_prompt_ms', ARGV[a + 3]) end
  end
end
