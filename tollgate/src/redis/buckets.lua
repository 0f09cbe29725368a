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
local out, size, failed = { now, 0 }, 2, nil
-- Of keys that are asked for more than once: the state so far, to be written at the end.
local A, B, changed = {}, {}, nil
local once = #q == 6 * #keys

local ceil, format, set = math.ceil, string.format, redis.pcall

local function fail(k, why)
  failed = failed or {}
  failed[k] = why
end

local function save(k, a, b)
  -- Written as integers here: Redis would write numbers as fractions of 17 digits, which takes longer.
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
    fail(k, 'holds something else')
  elseif reply.err then
    -- A replica can decide nothing, and has written nothing.
    if reply.err:find('READONLY', 1, true) then error(reply) end
    fail(k, reply.err)
  end
end

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
        fail(k, 'holds something else')
        a, b = 0, 0
      end
    end
  end
  -- From before the rate was changed, or of a variant of the limit.
  if b >= units then a, b = a + 1, 0 end
  size = size + 1
  local seen, seen_parts, debt = a, b, a - now
  -- Whether the state changes.
  local changes = false
  if debt < 0 then
    debt, b = 0, 0
  elseif debt > full or (debt == full and b > full_parts) then
    debt, b, changes = full, full_parts, true
  end
  local micros, sum = debt + cost, b + parts
  if sum >= units then
    micros, sum = micros + 1, sum - units
  end
  local denied = micros > full or (micros == full and sum > full_parts)
    or (max_wait >= 0 and debt + (b > 0 and 1 or 0) > max_wait)
  out[size] = denied and -1 - seen or seen
  if not denied then
    a, b, changes = now + micros, sum, true
  elseif changes then
    a = now + debt
  else
    a, b = seen, seen_parts
  end
  if not once then
    A[k], B[k] = a, b
    if changes then
      changed = changed or {}
      changed[k] = true
    end
  elseif changes and not (failed and failed[k]) then
    save(k, a, b)
  end
  if units > 1 then
    size = size + 1
    out[size] = seen_parts
  end
end

if changed then
  for k in pairs(changed) do
    if not (failed and failed[k]) then save(k, A[k], B[k]) end
  end
end
if not failed then return out end

local failures = {}
for k, why in pairs(failed) do
  failures[#failures + 1] = k
  failures[#failures + 1] = why
end
out[2] = failures
return out
