-- Every model's card and every live worker's figures, at one moment.
-- KEYS: models, workers
-- ARGV: what the keys of cards begin with, and those of figures
-- Returns {cards (each field, value, …), oldest first; figures (JSON)}.
local cards, figures = {}, {}
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local card = redis.call('HGETALL', ARGV[1] .. name)
  if #card > 0 then cards[#cards + 1] = card end
end
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local found = redis.call('GET', ARGV[2] .. worker)
  if found then figures[#figures + 1] = found end
end
return {cards, figures}
