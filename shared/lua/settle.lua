-- Say that a worker has registered again all that it holds. The first to say so of a new server has the others waited for:
-- `pull` takes nothing while the set of workers that have yet to say so is there.
-- KEYS: run of the server that is known, workers that have yet to say so, workers that may hold jobs
-- ARGV: worker, run of the server that it means, how long to wait for others in ms
-- Returns the run of the server. Where it is another one, nothing is done.
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
if run ~= ARGV[2] then return run end
local known = redis.call('GET', KEYS[1])
if known ~= run then
  redis.call('SET', KEYS[1], run)
  if known then
    redis.call('SUNIONSTORE', KEYS[2], KEYS[3])
    redis.call('PEXPIRE', KEYS[2], ARGV[3])
  end
end
redis.call('SREM', KEYS[2], ARGV[1])
return run
