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
-- Of each key the state so far; of keys that are asked for more than once, which are to be written at the end.
local A, B, changed = {}, {}, nil
local once = #q == 6 * #keys

local ceil, format, set = math.ceil, string.format, redis.pcall

-- States of other terms are converted by `decide.lua`, which is called instead when this answers 0. Nothing has been
-- written by then.
local absent, signatures = {}, {}
for at = 3, #q, 6 do
  local p, k = limits[q[at]], q[at + 1]
  p.signature = p.signature or format(p[5] >= 0 and '1:%d:%d:1' or '1:%d:%d', p[2], p[6])
  if signatures[k] and signatures[k] ~= p.signature then return 0 end
  signatures[k] = p.signature
  local value = values[k]
  if value then
    local signature, a, most, b = value:match('^([%d:]+) (%x+) (%d+) ?(%d*)$')
    if signature ~= p.signature or tonumber(most) > p[9] then return 0 end
    A[k], B[k] = tonumber(a, 16), tonumber(b) or 0
    if A[k] >= 9007199254740992 then return 0 end
  elseif not A[k] then
    A[k], B[k] = 0, 0
    absent[#absent + 1] = keys[k]
  end
end
if #absent > 0 and redis.call('EXISTS', unpack(absent)) > 0 then return 0 end

local function fail(k, why)
  failed = failed or {}
  failed[k] = why
end

local function save(k, p, a, b)
  -- Written as integers here: Redis would write numbers as fractions of 17 digits, which takes longer.
  local ttl = injected and '3600000' or format('%d', ceil((a - now) / 1000) + 1)
  local value = format(b > 0 and '%s %x %d %d' or '%s %x %d', p.signature, a, p[9], b)
  local reply = set('SET', keys[k], value, 'PX', ttl)
  if reply.err then
    -- A replica can decide nothing, and has written nothing.
    if reply.err:find('READONLY', 1, true) then error(reply) end
    fail(k, reply.err)
  end
end

for at = 3, #q, 6 do
  local p, k, cost, parts = limits[q[at]], q[at + 1], q[at + 2], q[at + 3]
  local units, full, full_parts, max_wait = p[2], p[3], p[4], p[5]
  local a, b = A[k], B[k]
  size = size + 1
  local seen, seen_parts, debt = a, b, a - now
  -- Whether the state changes.
  local changes = false
  if debt < 0 then
    debt, b = 0, 0
  elseif debt > p[7] or (debt == p[7] and b > p[8]) then
    -- The clock has stepped back: the debt that is left is what is told.
    debt, b, changes = p[7], p[8], true
    seen, seen_parts = now + debt, b
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
      changed[k] = p
    end
  elseif changes then
    save(k, p, a, b)
  end
  if units > 1 then
    size = size + 1
    out[size] = seen_parts
  end
end

if changed then
  for k, p in pairs(changed) do
    save(k, p, A[k], B[k])
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
