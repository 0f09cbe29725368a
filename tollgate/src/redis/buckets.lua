-- Decides a batch in which every request takes from one bucket, as most do: `decide.lua` without all that this
-- does not need. Making the functions of the other algorithms costs Redis as much as a decision.
--
-- It reads the same arguments. Of each request it tells the state that it saw: the first number, less than zero if
-- the request was denied (−1 − number), and the second where the rate needs one.

local asked = cmsgpack.unpack(ARGV[1])
local now, limits, q = asked[1], asked[2], asked[3]
local injected = now > 0
if not injected then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local keys = KEYS
local values = redis.call('MGET', unpack(keys))
local A, B, changed, failed = {}, {}, {}, {}
local out, size = { now, 0 }, 2

for at = 3, #q, 6 do
  local p, k, cost, parts = limits[q[at]], q[at + 1], q[at + 2], q[at + 3]
  local units, full, full_parts, max_wait = p[2], p[3], p[4], p[5]
  local a, b = A[k], B[k]
  if not a then
    local value = values[k]
    a, b = 0, 0
    if value then
      a = tonumber(value)
      if not a then
        local first, second = value:match('^(%d+) (%d+)$')
        a, b = tonumber(first), tonumber(second)
      end
      if not a or not b or a < 0 or a >= 9007199254740992 or a % 1 ~= 0 then
        failed[k], a, b = 'holds something else', 0, 0
      elseif b >= units then
        -- From before the rate was changed.
        a, b = a + 1, 0
      end
    end
  end
  size = size + 1
  local seen, seen_parts, debt, cut = a, b, a - now, false
  if debt < 0 then
    debt, b = 0, 0
  elseif debt > full or (debt == full and b > full_parts) then
    debt, b, cut = full, full_parts, true
  end
  local micros, sum = debt + cost, b + parts
  if sum >= units then
    micros, sum = micros + 1, sum - units
  end
  if micros > full or (micros == full and sum > full_parts)
    or (max_wait >= 0 and debt + (b > 0 and 1 or 0) > max_wait) then
    out[size] = -1 - seen
    if cut then
      A[k], B[k], changed[k] = now + debt, b, true
    else
      A[k], B[k] = seen, seen_parts
    end
  else
    out[size] = seen
    A[k], B[k], changed[k] = now + micros, sum, true
  end
  if units > 1 then
    size = size + 1
    out[size] = seen_parts
  end
end

-- Written as integers here: Redis would write numbers with 17 digits of fraction in mind, which takes longer.
local ceil, format, set = math.ceil, string.format, redis.pcall
for k in pairs(changed) do
  if not failed[k] then
    local a, b = A[k], B[k]
    local ttl = injected and '3600000' or format('%d', ceil((a - now) / 1000) + 1)
    local value = b > 0 and format('%d %d', a, b) or format('%d', a)
    local reply
    if values[k] then
      reply = set('SET', keys[k], value, 'PX', ttl)
    else
      -- What is there and was not read is not ours.
      reply = set('SET', keys[k], value, 'PX', ttl, 'NX')
    end
    if not reply then
      failed[k] = 'holds something else'
    elseif reply.err then
      failed[k] = reply.err
    end
  end
end

local failures = {}
for k, why in pairs(failed) do
  failures[#failures + 1] = k
  failures[#failures + 1] = why
end
if #failures > 0 then out[2] = failures end
return out
