-- Decides a batch of requests in order, each all or nothing.
--
-- KEYS: the distinct keys of the batch. ARGV[1]: {now or 0, limits, requests} in MessagePack, as `script.rs` writes it.
-- Every number is an integer below 2^53. The script decides, writes, and replies with the state that it found, from
-- which Rust computes the numbers of the decision. Logs are too long to return, so for them the script computes these
-- numbers itself.
--
-- In the compact layout, KEYS[k] is a hash, and ARGV[k + 1] is the field of the key in it, or empty for a key of its own:
-- see `take.lua`.
--
-- States are kept in Lua until the end, so that a key with a hundred hits is written once. An error in one key fails
-- only the requests for that key.

local floor, ceil, max, min, format = math.floor, math.ceil, math.max, math.min, string.format
local call, pcall_redis = redis.call, redis.pcall
local pack, read, byte = struct.pack, struct.unpack, string.byte
local asked = cmsgpack.unpack(ARGV[1])
local now, limits, q = asked[1], asked[2], asked[3]
local injected = now > 0
if not injected then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local is_compact = #ARGV > 1
local values = is_compact and {} or call('MGET', unpack(KEYS))

local METER, INTERVAL, CLOCK, OPENED, LOG, COUNTER, STRIKES = 1, 2, 3, 4, 5, 6, 7
-- The kinds, in a signature, of a bucket whose requests wait in a queue, and of a log.
local QUEUE, LOG_MARK = 8, 9
local TAKE, LOOK, REFUND, RESET, SLICE, UNDO, CREDIT, SETTLE, OWE, WITHOUT = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9

-- For each key: the first two numbers of its state (A, B); the counts of a counter (C); the largest quota, in units, of
-- the limits that wrote a bucket or a log, or what a bucket has owed if that was more (K); the terms of the state; when
-- it expires; and the terms to write it with, if it has changed.
local A, B, C, K, terms, ends, dirty = {}, {}, {}, {}, {}, {}, {}
-- Logs by key.
local logs = {}
-- Converted copies that cannot hold all units that were spent. They are full, and must not replace the state.
local cut = {}
-- Keys that are hashes: logs of several blocks.
local hashes = {}
-- By key, in the compact layout: its field. By the name of a hash: the time until which it is kept, and its signature.
local fields, kept_until, hash_signature = {}, {}, {}
local failed = {}

local function fail(k, why)
  if not failed[k] then
    failed[k] = why
  end
end

-- Reads the states of the compact layout.
local function load_fields()
  for k = 1, #KEYS do
    local key, field = KEYS[k], ARGV[k + 1]
    if field == '' then
      values[k] = call('MGET', key)[1]
    else
      fields[k], values[k] = field, false
      local found = pcall_redis('HMGET', key, '', field)
      local head = found[1]
      if found.err then
        fail(k, found.err:find('WRONGTYPE', 1, true) and 'holds something else' or found.err)
      elseif head and #head >= 14 then
        kept_until[key], hash_signature[key] = read('>I7', head), head:sub(8)
        values[k] = found[2]
        if values[k] and byte(values[k]) == 255 then values[k] = hash_signature[key] .. values[k]:sub(2) end
      elseif head or found[2] or call('EXISTS', key) == 1 then
        fail(k, 'holds something else')
      end
    end
  end
end
if is_compact then load_fields() end

local function is_count(n)
  return n and n >= 0 and n < 9007199254740992 and n % 1 == 0
end

-- Terms are the settings that a state was written under. They are identified by a signature: the kind of the limit and
-- its rate or window, as `script.rs` writes them. It excludes quotas, which do not change the units that were spent.
for index = 1, #limits do
  local p = limits[index]
  p.signature = table.remove(p)
  if type(p[#p]) == 'table' then p.variants = table.remove(p) end
end

-- Reads the terms at the start of a state: those of the request (`p`) if they have the same signature, or else all
-- settings of a limit except its quota. Also returns the length of the signature. Another limit of the batch may have the
-- signature too, but not the quota.
local function terms_of(text, p)
  if text:sub(1, #p.signature) == p.signature then return p, #p.signature end
  local code = text:byte()
  if not code or code >= 64 then return nil end
  local kind, is_long, has_units = code % 16, floor(code / 16) % 2 == 1, code >= 32
  local length = is_long and 8 or 7
  if kind == QUEUE or kind == METER then
    if has_units then length = length + 5 end
  elseif kind == COUNTER then
    length = length + 2
  elseif kind == INTERVAL or kind == STRIKES then
    length = 15
  end
  local signature = text:sub(1, length)
  if #signature < length then return nil end
  local x, y, units, at = 0, 1, 1, 2
  p = nil
  if kind == INTERVAL or kind == STRIKES then
    x, y = read('>I7I7', signature, 2)
    p = { kind, 0, x, y }
  else
    if has_units then units, at = read('>I5', signature, 2) end
    x, at = read(is_long and '>I7' or '>I6', signature, at)
    if kind == QUEUE or kind == METER then
      p = { METER, units, 0, 0, kind == QUEUE and 0 or -1, x, 0, 0, 0 }
    elseif kind == COUNTER then
      y = read('>I2', signature, at)
      p = { kind, 0, x, y }
    elseif kind == CLOCK or kind == OPENED or kind == LOG_MARK then
      p = { kind == LOG_MARK and LOG or kind, 0, x, 0, 0 }
    end
  end
  if not p or x == 0 or y == 0 or units == 0 or not is_count(x) or not is_count(y) then return nil end
  p.signature = signature
  return p, length
end

-- The terms of a key that has spent nothing.
local REST = {}

local function try(k, ...)
  local reply = pcall_redis(...)
  if type(reply) == 'table' and reply.err then
    -- A replica cannot decide, and has written nothing.
    if reply.err:find('READONLY', 1, true) then error(reply) end
    fail(k, reply.err)
    return nil
  end
  return reply
end

local function spoil(k)
  fail(k, 'holds something else')
  A[k], B[k], terms[k] = 0, 0, REST
end

local function zeros(segments)
  local counts = { segments = segments }
  for age = 0, segments do
    counts[age] = 0
  end
  return counts
end

-- The stored form of a count: its segment, modulo a number larger than the number of segments, and its units.
local function pairs_of(p)
  if p[4] < 255 then return '>I1I5', 6, 256 end
  return '>I2I5', 7, 65536
end

local start_of

local function load_counter(k, p, text, from)
  local pair, width, cycle = pairs_of(p)
  local counts, segment = zeros(p[4]), nil
  if #text < from + 6 then return spoil(k) end
  segment, from = read('>I7', text, from)
  -- Skip the total units.
  if p[4] > 1 then from = from + 5 end
  if not is_count(segment) or (#text + 1 - from) % width ~= 0 then return spoil(k) end
  for at = from, #text, width do
    local place, units = read(pair, text, at)
    local age = (segment - place) % cycle
    if age > p[4] then return spoil(k) end
    counts[age] = units
  end
  A[k], C[k], terms[k] = start_of(segment, p[3], p[4]), counts, p
end

-- Adds a log that was read: its last block, and the head of its other blocks, if there are any.
local function load_log(k, p, most, closed, index, tail)
  if #tail < 17 or (#tail - 5) % 12 ~= 0 or #index % 15 ~= 0 then return spoil(k) end
  logs[k] = { owner = k, index = index, closed = closed, tail = tail, loaded = {}, changed = {}, removed = {} }
  K[k], terms[k] = most, p
end

-- Reads a log in a ring: see `ring_of`.
local function load_ring(k, p, text, from)
  if #text < from + 46 then return spoil(k) end
  local most, _, head, count, slots = read('>I5I7I2I2I2', text, from)
  local at, after = from + 47, head + count
  if #text ~= at - 1 + 12 * slots or count == 0 or count > slots or head >= slots then return spoil(k) end
  local tail
  if head == 0 then
    tail = text:sub(at - 5, at + 12 * count - 1)
  else
    tail = text:sub(at - 5, at - 1) .. text:sub(at + 12 * head, at + 12 * min(after, slots) - 1)
      .. text:sub(at, at + 12 * max(after - slots, 0) - 1)
  end
  load_log(k, p, most, 0, '', tail)
end

-- Loads a state for a request under these terms: its signature, then its numbers. A log of several blocks is a hash with
-- the state in its field `h`.
local function load(k, asked_terms)
  A[k], B[k], K[k], terms[k] = 0, 0, 0, REST
  local value = values[k]
  if not value then
    if fields[k] then return end
    local found = pcall_redis('HMGET', KEYS[k], 'h', 't')
    if found.err then return spoil(k) end
    local head, tail = found[1], found[2]
    if not head or not tail then
      if call('EXISTS', KEYS[k]) == 1 then spoil(k) end
      return
    end
    local p, length = terms_of(head, asked_terms)
    if not p or p[1] ~= LOG or #head < length + 10 then return spoil(k) end
    local most, closed, from = read('>I5I5', head, length + 1)
    hashes[k] = true
    return load_log(k, p, most, closed, head:sub(from), tail)
  end
  local p, length = terms_of(value, asked_terms)
  if not p then return spoil(k) end
  if p[1] == COUNTER then return load_counter(k, p, value, length + 1) end
  if p[1] == LOG then return load_ring(k, p, value, length + 1) end
  local a, b, most = 0, 0, 0
  if p[1] == CLOCK or p[1] == OPENED then
    if #value ~= length + 12 then return spoil(k) end
    a, b = read('>I7I5', value, length + 1)
  elseif p[1] ~= METER then
    if #value ~= length + 14 then return spoil(k) end
    a, b = read('>I7I7', value, length + 1)
  elseif p[2] > 1 then
    if #value ~= length + 17 then return spoil(k) end
    most, a, b = read('>I5I7I5', value, length + 1)
  else
    if #value ~= length + 12 then return spoil(k) end
    most, a = read('>I5I7', value, length + 1)
  end
  if not is_count(a) or not is_count(b) then return spoil(k) end
  A[k], B[k], K[k], terms[k] = a, b, most, p
end

-- Returns the exact quotient and remainder of a * b by c, for a below 2^53, b and c below 2^51, and a quotient below
-- 2^53.
local function muldiv(a, b, c)
  local product = a * b
  if product < 9007199254740992 then
    local rest = product % c
    return (product - rest) / c, rest
  end
  local b_rest = b % c
  local b_whole, quotient, rest = (b - b_rest) / c, 0, 0
  for bit = 52, 0, -1 do
    quotient, rest = quotient * 2, rest * 2
    if floor(a / 2 ^ bit) % 2 == 1 then quotient, rest = quotient + b_whole, rest + b_rest end
    while rest >= c do
      quotient, rest = quotient + 1, rest - c
    end
  end
  return quotient, rest
end

-- Returns the segment of a moment, and the time since its start in 1/segments of a microsecond.
local function place(moment, window, segments)
  local rest = moment % window
  local whole = (moment - rest) / window
  if rest * segments < 9007199254740992 then
    local ticks = rest * segments
    local elapsed = ticks % window
    return whole * segments + (ticks - elapsed) / window, elapsed
  end
  local quotient, elapsed = 0, 0
  for bit = 10, 0, -1 do
    quotient, elapsed = quotient * 2, elapsed * 2
    if floor(segments / 2 ^ bit) % 2 == 1 then elapsed = elapsed + rest end
    while elapsed >= window do
      quotient, elapsed = quotient + 1, elapsed - window
    end
  end
  return whole * segments + quotient, elapsed
end

-- Returns the first microsecond of a segment, which `place` maps back to it.
function start_of(segment, window, segments)
  local within = segment % segments
  local rest = window % segments
  return (segment - within) / segments * window + within * ((window - rest) / segments) + ceil(within * rest / segments)
end

-- By kind: `judge` returns whether a cost is allowed, and the state to write, if any; `give_back` returns the state
-- after a refund, if it changes. Windows and periods are identified by their start.
local judge, give_back = {}, {}

local MAX_SPAN = 1125899906842624
-- The longest time until a reservation expires, in milliseconds, and a minute more.
local RESERVED_FOR = '86460000'

-- Returns the largest debt of a key that owes at most this many units. A larger debt means that the clock stepped back.
local function most_of(units, p)
  if units <= p[9] then return p[7], p[8] end
  if units * p[6] / p[2] > 4503599627370496 then return MAX_SPAN, 0 end
  local micros, parts = muldiv(units, p[6], p[2])
  if micros >= MAX_SPAN then return MAX_SPAN, 0 end
  return micros, parts
end

local function meter_now(k, p)
  local a, b = A[k], B[k]
  if a < now then return now, 0, false end
  local debt, most, most_parts = a - now, most_of(K[k], p)
  if debt > most or (debt == most and b > most_parts) then return now + most, most_parts, true end
  return a, b, false
end

judge[METER] = function(k, p, cost, parts)
  local a, b, cut = meter_now(k, p)
  local edit = cut and { a, b, a } or nil
  if cost == 0 and parts == 0 then return true, edit end
  local micros, sum = a - now + cost, b + parts
  if sum >= p[2] then micros, sum = micros + 1, sum - p[2] end
  local late = p[5] >= 0 and a - now + (b > 0 and 1 or 0) > p[5]
  if late or micros > p[3] or (micros == p[3] and sum > p[4]) then return false, edit end
  return true, { now + micros, sum, now + micros + 1 }
end

-- Units that have been refilled since they were taken are not given back again. If the debt before the charge is known
-- (`before` and its parts), the refill pays that debt first.
give_back[METER] = function(k, p, cost, parts, at, before, before_parts)
  if now < at then return end
  local a, b = meter_now(k, p)
  if p[5] >= 0 then
    -- Requests in a queue have fixed start times, so a charge can be undone only if no other came after it.
    if not before then return end
    local micros, sum = at + before + cost, before_parts + parts
    if sum >= p[2] then micros, sum = micros + 1, sum - p[2] end
    if a ~= micros or b ~= sum then return end
    return { at + before, before_parts, at + before + 1 }
  end
  local debt = a - now
  local owed = cost - max(now - at - (before or 0), 0)
  if owed < 0 then return end
  if owed > debt or (owed == debt and parts > b) then owed, parts = debt, b end
  if owed == 0 and parts == 0 then return end
  local micros, rest = debt - owed, b - parts
  if rest < 0 then micros, rest = micros - 1, rest + p[2] end
  return { now + micros, rest, now + micros + 1 }
end

local function interval_now(k, p)
  local current = now - now % p[4]
  local period, tokens = A[k] - A[k] % p[4], B[k]
  if period <= current then return current, max(tokens - p[3] * ((current - period) / p[4]), 0), false end
  return min(period, current + p[4]), tokens, period > current + p[4]
end

local function interval_edit(p, period, tokens)
  return { period, tokens, period + ceil(tokens / p[3]) * p[4] }
end

judge[INTERVAL] = function(k, p, cost)
  local period, tokens, back = interval_now(k, p)
  local passes = cost <= p[2] and cost <= max(p[2] - tokens, 0)
  if passes and cost > 0 then return true, interval_edit(p, period, tokens + cost) end
  return passes, back and interval_edit(p, period, tokens) or nil
end

give_back[INTERVAL] = function(k, p, cost, _, at, before)
  if now < at then return end
  local period, tokens = interval_now(k, p)
  local came_back = p[3] * max((period - (at - at % p[4])) / p[4], 0)
  local owed = min(max(cost - max(came_back - (before or 0), 0), 0), tokens)
  if owed > 0 then return interval_edit(p, period, tokens - owed) end
end

local function judge_count(limit, window, units, ends_at, back, cost)
  local passes = cost <= limit and cost <= max(limit - units, 0)
  if passes and cost > 0 then return true, { window, units + cost, ends_at } end
  return passes, back and { window, units, ends_at } or nil
end

local function clock_now(k, p)
  local current = now - now % p[3]
  local window = A[k] - A[k] % p[3]
  if window < current then return current, 0, false end
  return min(window, current + p[3]), B[k], window > current + p[3]
end

judge[CLOCK] = function(k, p, cost)
  local window, units, back = clock_now(k, p)
  return judge_count(p[2], window, units, window + p[3], back, cost)
end

give_back[CLOCK] = function(k, p, cost, _, at)
  local window, units = clock_now(k, p)
  if at - at % p[3] == window and units > 0 and cost > 0 then
    return { window, max(units - cost, 0), window + p[3] }
  end
end

local function opened_now(k, p)
  local opened, units = A[k], B[k]
  if units > 0 and now < opened + p[3] then return min(opened, now), units, opened > now end
  return now, 0, false
end

judge[OPENED] = function(k, p, cost)
  local opened, units, back = opened_now(k, p)
  return judge_count(p[2], opened, units, opened + p[3], back, cost)
end

give_back[OPENED] = function(k, p, cost, _, at)
  local opened, units = opened_now(k, p)
  if at >= opened and units > 0 and cost > 0 then
    return { opened, max(units - cost, 0), opened + p[3] }
  end
end

-- Returns the start of the current period and its marks: twice the number of strikes, plus 1 during a ban.
local function strikes_now(k, p)
  local since, marks = A[k], B[k]
  local span = marks % 2 == 1 and p[4] or p[3]
  if marks > 0 and now < since + span then return min(since, now), marks, span, since > now end
  return now, 0, p[3], false
end

judge[STRIKES] = function(k, p, cost)
  local since, marks, span, back = strikes_now(k, p)
  local banned = marks % 2 == 1
  if banned or cost == 0 then return not banned, back and { since, marks, since + span } or nil end
  local strikes = marks / 2 + cost
  if strikes >= p[2] then return true, { now, 2 * p[2] + 1, now + p[4] } end
  return true, { since, 2 * strikes, since + p[3] }
end

give_back[STRIKES] = function(k, p, cost, _, at)
  local since, marks, span = strikes_now(k, p)
  if marks == 0 or marks % 2 == 1 or cost == 0 or at < since then return end
  return { since, max(marks - 2 * cost, 0), since + span }
end

-- Returns the counts shifted to a segment, with the count of one age replaced.
local function counter_edit(k, p, segment, passed, age, units)
  local old, new = C[k], { segments = p[4] }
  for index = 0, p[4] do
    new[index] = passed <= index and old[index - passed] or 0
  end
  if age then new[age] = units end
  return { start_of(segment, p[3], p[4]), new, start_of(segment + p[4] + 1, p[3], p[4]) }
end

local function counter_now(k, p)
  local segment, elapsed = place(now, p[3], p[4])
  local stored = place(A[k], p[3], p[4])
  if stored <= segment then return segment, elapsed, segment - stored, false end
  return min(stored, segment + 1), 0, 0, stored > segment + 1
end

judge[COUNTER] = function(k, p, cost)
  local limit, window, segments = p[2], p[3], p[4]
  local segment, elapsed, passed, back = counter_now(k, p)
  local counts, inside = C[k], 0
  for age = 0, segments - passed - 1 do
    inside = inside + counts[age]
  end
  local leaving = passed <= segments and counts[segments - passed] or 0
  local room = limit - inside - cost
  local passes = cost == 0 or (room >= 0 and muldiv(leaving, window - elapsed, window) <= room)
  if passes and cost > 0 then
    local current = passed == 0 and counts[0] or 0
    return true, counter_edit(k, p, segment, passed, 0, current + cost)
  end
  return passes, back and counter_edit(k, p, segment, 0) or nil
end

give_back[COUNTER] = function(k, p, cost, _, at)
  local segment, _, passed = counter_now(k, p)
  local age = segment - place(at, p[3], p[4])
  if age < 0 or age > p[4] or age < passed then return end
  local units = C[k][age - passed]
  if units > 0 and cost > 0 then
    return counter_edit(k, p, segment, passed, age, max(units - cost, 0))
  end
end

-- A log is a list of entries, oldest first, in blocks. A block starts with a sum of units (5 bytes). Each entry is a
-- moment (7 bytes) and the sum including its units (5 bytes), modulo 2^40. So the units of a range of entries are the
-- difference of two sums, and logs are searched by bisection instead of scanned.
--
-- Each block but the last was full when it was closed. The index has its number, last moment and units. A log of one
-- block is stored as a string, a longer one as a hash. Only the newest entry can have no units: it keeps its moment
-- after a refund.
--
-- The string is a ring of entries after a header, so that `take.lua` adds an entry by reading and writing only the header
-- and the entry. Redis hashes every byte of each string that Lua creates, so here, where a log is read as a whole, a long
-- ring would be slow.

local BLOCK, LONGEST_RING, ENTRY, INDEX, WRAP = 128, 256, 12, 15, 1099511627776
-- The most units that a key counts: more than any quota, and few enough to add to.
local MOST_CHARGED = 549755813888
local NO_ENTRIES = pack('>I5', 0)

local function empty_log()
  return { index = '', closed = 0, tail = NO_ENTRIES, loaded = {}, changed = {}, removed = {} }
end

local function copy_table(from)
  local to = {}
  for name, value in pairs(from) do
    to[name] = value
  end
  return to
end

local function copy_log(log)
  local copy = copy_table(log)
  copy.loaded, copy.changed, copy.removed = copy_table(log.loaded), copy_table(log.changed), copy_table(log.removed)
  return copy
end

-- Returns the bytes of a block. `at` is its position in the index, or past the end of the index for the last block.
local function block_at(log, at)
  if at > #log.index then return log.tail end
  local id = read('>I3', log.index, at)
  local text = log.changed[id] or log.loaded[id]
  if not text then
    text = try(log.owner, 'HGET', KEYS[log.owner], format('%d', id))
    if not text or #text < 5 + ENTRY or (#text - 5) % ENTRY ~= 0 then
      fail(log.owner, 'holds something else')
      text = NO_ENTRIES
    end
    log.loaded[id] = text
  end
  return text
end

-- Returns the units of the first `count` entries of a block.
local function units_of(text, count)
  if count == 0 then return 0 end
  local _, sum = read('>I7I5', text, ENTRY * count - 6)
  return (sum - read('>I5', text, 1)) % WRAP
end

-- Returns the units of a log, its newest moment, and the units of that moment. A log without units is empty.
local function log_now(log)
  local count = (#log.tail - 5) / ENTRY
  local of_tail = units_of(log.tail, count)
  local total = log.closed + of_tail
  if total == 0 then return 0, 0, 0 end
  local newest = read('>I7', log.tail, ENTRY * count - 6)
  return total, newest, of_tail - units_of(log.tail, count - 1)
end

-- Finds the entries up to a moment. Returns `at`, `count` and units: they are all blocks before the position `at` and
-- the first `count` entries of the block there.
local function split_by_time(log, moment)
  local at, units = 1, 0
  while at <= #log.index do
    local _, last, of_block = read('>I3I7I5', log.index, at)
    if last > moment then break end
    at, units = at + INDEX, units + of_block
  end
  local text = block_at(log, at)
  local low, high = 0, (#text - 5) / ENTRY
  while low < high do
    local middle = ceil((low + high) / 2)
    if read('>I7', text, ENTRY * middle - 6) <= moment then low = middle else high = middle - 1 end
  end
  return at, low, units + units_of(text, low)
end

-- Finds the oldest entries whose units add up to at most `most`, and returns the same values.
local function split_by_units(log, most)
  local at, units = 1, 0
  while at <= #log.index do
    local _, _, of_block = read('>I3I7I5', log.index, at)
    if units + of_block > most then break end
    at, units = at + INDEX, units + of_block
  end
  local text = block_at(log, at)
  local low, high = 0, (#text - 5) / ENTRY
  while low < high do
    local middle = ceil((low + high) / 2)
    if units + units_of(text, middle) <= most then low = middle else high = middle - 1 end
  end
  return at, low, units + units_of(text, low)
end

-- Removes a closed block.
local function remove_block(log, at)
  local id, _, units = read('>I3I7I5', log.index, at)
  log.closed, log.changed[id], log.removed[id] = log.closed - units, nil, true
  log.index = log.index:sub(1, at - 1) .. log.index:sub(at + INDEX)
end

local function change_block(log, at, text, last)
  local id, _, units = read('>I3I7I5', log.index, at)
  local count = (#text - 5) / ENTRY
  local left = units_of(text, count)
  log.closed, log.changed[id] = log.closed - units + left, text
  log.index = log.index:sub(1, at - 1) .. pack('>I3I7I5', id, last, left) .. log.index:sub(at + INDEX)
end

-- Drops the entries that a split found.
local function drop(log, at, count)
  for block = 1, at - 1, INDEX do
    local id, _, units = read('>I3I7I5', log.index, block)
    log.closed, log.changed[id], log.removed[id] = log.closed - units, nil, true
  end
  log.index = log.index:sub(at)
  if count == 0 then return end
  local text = block_at(log, 1)
  local _, sum = read('>I7I5', text, ENTRY * count - 6)
  local kept = pack('>I5', sum) .. text:sub(ENTRY * count + 6)
  if log.index == '' then
    log.tail = kept
  else
    local _, last = read('>I3I7', log.index, 1)
    change_block(log, 1, kept, last)
  end
end

-- Turns the oldest of many entries into one of the time of the last of them, as far as they have at most `most` units: their
-- number is then bounded, and the newer ones exceed every limit, even if all that was admitted is given back.
local function merge_oldest(log, most)
  local at, count = split_by_units(log, most)
  if count == 0 and at > 1 then
    at = at - INDEX
    count = (#block_at(log, at) - 5) / ENTRY
  end
  local before = 0
  for _ = 1, at - 1, INDEX do
    local _, _, units = read('>I3I7I5', log.index, 1)
    before = before + units
    remove_block(log, 1)
  end
  local text = block_at(log, 1)
  if count == 0 or before == 0 and count == 1 then return end
  -- The units of the first entry are its sum less the one before it.
  text = pack('>I5', (read('>I5', text, 1) - before) % WRAP) .. text:sub(ENTRY * (count - 1) + 6)
  if log.index == '' then
    log.tail = text
  else
    local _, last = read('>I3I7', log.index, 1)
    change_block(log, 1, text, last)
  end
end

-- Closes the last block, which has `count` entries.
local function close(log, count)
  local tail = log.tail
  for from = 0, count - 1, BLOCK do
    local to = min(from + BLOCK, count)
    local base = from == 0 and tail:sub(1, 5) or tail:sub(ENTRY * from + 1, ENTRY * from + 5)
    local text = base .. tail:sub(ENTRY * from + 6, ENTRY * to + 5)
    local id = 1
    if log.index ~= '' then id = read('>I3', log.index, #log.index - INDEX + 1) % 16777215 + 1 end
    local of_block = units_of(text, to - from)
    log.index = log.index .. pack('>I3I7I5', id, read('>I7', tail, ENTRY * to - 6), of_block)
    log.closed, log.changed[id], log.removed[id] = log.closed + of_block, text, nil
  end
end

-- Adds units at a moment that is not before the newest. Units at the same moment are merged into one entry of at most
-- `most` units, or of as many as it had. The last block has at most `longest` entries if it is the only one.
local function append(log, at, units, most, longest)
  local text = log.tail
  local count = (#text - 5) / ENTRY
  if count > 0 then
    local newest = read('>I7', text, ENTRY * count - 6)
    local of_newest = units_of(text, count) - units_of(text, count - 1)
    if newest == at then units = min(of_newest + units, max(most, of_newest)) end
    if newest == at or of_newest == 0 then
      count = count - 1
      text = text:sub(1, ENTRY * count + 5)
    elseif count >= (log.index == '' and longest or BLOCK) then
      close(log, count)
      text, count = NO_ENTRIES, 0
    end
  end
  local sum
  if count > 0 then
    local _
    _, sum = read('>I7I5', text, ENTRY * count - 6)
  else
    sum = read('>I5', text, 1)
  end
  log.tail = text .. pack('>I7I5', at, (sum + units) % WRAP)
end

-- Also returns the decision: result (1 allowed, 0 denied, 2 never possible), remaining, retry, reset.
judge[LOG] = function(k, p, cost)
  local limit, window, counts_denied, ceiling = p[2], p[3], p[4] == 1, max(p[5], K[k] or 0)
  local log = logs[k]
  local total, newest, last_units = log_now(log)
  if newest > now + window then
    local units = min(total, limit)
    local remaining = limit - units
    local counts = cost <= remaining or (counts_denied and cost <= limit)
    local edit = { collapse = true, add = counts and cost or 0, total = total, ceiling = ceiling, ends = now + window }
    if cost > limit then return false, edit, { 2, remaining, 0, window } end
    if cost <= remaining then return true, edit, { 1, remaining - cost, 0, window } end
    return false, edit, { 0, counts and 0 or remaining, window, window }
  end
  local held = max(newest, now)
  local block, count, gone = 1, 0, 0
  if total > 0 then block, count, gone = split_by_time(log, held - window) end
  local units = max(total - gone, 0)
  local remaining = max(limit - units, 0)
  local until_gone = held + window - now
  local edit = {
    empty = total == 0, block = block, count = count, at = held, add = cost, ceiling = ceiling, ends = held + window,
  }
  if cost > 0 and cost <= remaining then return true, edit, { 1, remaining - cost, 0, until_gone } end
  local reset_after = 0
  if units > 0 then
    local last = newest
    if last_units == 0 then
      -- The newest entry has no units left, but the entry before it has.
      local entries = (#log.tail - 5) / ENTRY
      if entries > 1 then
        last = read('>I7', log.tail, ENTRY * (entries - 1) - 6)
      else
        last = read('>I7', log.index, #log.index - INDEX + 4)
      end
    end
    reset_after = max(last + window - now, 0)
  end
  if cost == 0 then return true, nil, { 1, remaining, 0, reset_after } end
  if cost > limit then return false, nil, { 2, remaining, 0, reset_after } end
  local left = counts_denied and units + cost or units
  local retry = until_gone
  if units > 0 then
    -- The wait ends with the first entry whose expiry frees enough units.
    local at, before = split_by_units(log, gone + left + cost - limit - 1)
    local text = block_at(log, at)
    if ENTRY * before + 5 < #text then
      retry = max(read('>I7', text, ENTRY * (before + 1) - 6) + window - now, 0)
    end
  end
  if not counts_denied then return false, nil, { 0, remaining, retry, reset_after } end
  if units > 0 and left >= ceiling then
    -- Without its oldest entries the log still exceeds every limit, so they can be dropped.
    edit.block, edit.count = split_by_units(log, gone + left - ceiling)
  end
  return false, edit, { 0, max(limit - units - cost, 0), retry, until_gone }
end

local function write_log(k, p, edit)
  -- A log that counts denied requests is always written here, as a whole if it is a ring.
  local log, longest = logs[k], p[4] == 1 and BLOCK or LONGEST_RING
  local most = edit.most or edit.ceiling
  K[k] = max(K[k] or 0, p[4] == 1 and edit.ceiling or p[2])
  if edit.collapse or edit.empty then
    drop(log, #log.index + 1, (#log.tail - 5) / ENTRY)
  else
    drop(log, edit.block, edit.count)
    local entries = #log.index / INDEX * BLOCK + #log.tail / ENTRY
    if edit.beyond and edit.beyond > 0 and entries > max(2 * edit.ceiling, BLOCK) then merge_oldest(log, edit.beyond) end
  end
  if edit.collapse then
    append(log, now, min(edit.total + edit.add, max(most, edit.total)), WRAP, longest)
  else
    append(log, edit.at, edit.add, most, longest)
  end
end

-- Merges a block of few entries with the next, so that refunds do not leave a long index of small blocks.
local function merge_block(log, at)
  local text, next_at = block_at(log, at), at + INDEX
  if #text > 5 + ENTRY * BLOCK / 4 or next_at > #log.index then return end
  local after = block_at(log, next_at)
  if #text + #after > 10 + ENTRY * BLOCK / 2 then return end
  local words = { text }
  local _, sum = read('>I7I5', text, #text - ENTRY + 1)
  for entry = 1, (#after - 5) / ENTRY do
    words[#words + 1] = pack('>I7I5', read('>I7', after, ENTRY * entry - 6), (sum + units_of(after, entry)) % WRAP)
  end
  local _, last = read('>I3I7', log.index, next_at)
  remove_block(log, next_at)
  change_block(log, at, table.concat(words), last)
end

-- Returns entries of a block, with fewer units in their sums. Most of the work is in calls to `struct`, so it reads and
-- writes eight entries at a time.
local EIGHT = '>' .. string.rep('I7I5', 8)

local function lowered(text, from, to, by)
  local words = {}
  while from + 7 <= to do
    local numbers = { read(EIGHT, text, ENTRY * from - 6) }
    for at = 2, 16, 2 do
      numbers[at] = (numbers[at] - by) % WRAP
    end
    words[#words + 1], from = pack(EIGHT, unpack(numbers, 1, 16)), from + 8
  end
  for entry = from, to do
    local moment, sum = read('>I7I5', text, ENTRY * entry - 6)
    words[#words + 1] = pack('>I7I5', moment, (sum - by) % WRAP)
  end
  return table.concat(words)
end

local function give_back_log(k, p, cost, charged_at)
  local log = logs[k]
  local total, newest = log_now(log)
  if total == 0 then return end
  local at = 1
  while at <= #log.index do
    local _, last = read('>I3I7', log.index, at)
    if last >= charged_at then break end
    at = at + INDEX
  end
  local text = block_at(log, at)
  local low, high = 0, (#text - 5) / ENTRY
  local entries = high
  while low < high do
    local middle = ceil((low + high) / 2)
    if read('>I7', text, ENTRY * middle - 6) <= charged_at then low = middle else high = middle - 1 end
  end
  if low == 0 or read('>I7', text, ENTRY * low - 6) ~= charged_at then return end
  local has = units_of(text, low) - units_of(text, low - 1)
  local given = min(cost, has)
  if given == 0 then return end
  local is_newest = at > #log.index and low == entries
  local changed_from = (given < has or is_newest) and low or low + 1
  text = text:sub(1, ENTRY * (low - 1) + 5) .. lowered(text, changed_from, entries, given)
  if at > #log.index then
    log.tail = text
  elseif #text == 5 then
    remove_block(log, at)
  else
    change_block(log, at, text, read('>I7', text, #text - ENTRY + 1))
    merge_block(log, at)
  end
  ends[k], dirty[k] = max(newest + p[3], now), p
end

-- Gives back units of the newest entries. The newest entry keeps its moment.
local function credit_log(k, p, units)
  local log = logs[k]
  local total, newest = log_now(log)
  if total == 0 then return end
  local keep = max(total - units, 0)
  local at, count, kept = split_by_units(log, keep)
  local text = block_at(log, at)
  if failed[k] then return end
  local words = { text:sub(1, ENTRY * count + 5) }
  local sum, last = read('>I5', text, 1), 0
  if count > 0 then last, sum = read('>I7I5', text, ENTRY * count - 6) end
  if keep > kept then
    last, sum = read('>I7', text, ENTRY * (count + 1) - 6), (sum + keep - kept) % WRAP
    words[#words + 1] = pack('>I7I5', last, sum)
  end
  if last ~= newest then words[#words + 1] = pack('>I7I5', newest, sum) end
  for block = at, #log.index, INDEX do
    local id, _, of_block = read('>I3I7I5', log.index, block)
    log.closed, log.changed[id], log.removed[id] = log.closed - of_block, nil, true
  end
  log.index, log.tail = log.index:sub(1, at - 1), table.concat(words)
  ends[k], dirty[k] = max(newest + p[3], now), p
end

-- Returns the counts after units of the newest segments were given back, if there were any.
local function credit_counter(k, p, units)
  local segment, _, passed = counter_now(k, p)
  local edit = counter_edit(k, p, segment, passed)
  local counts, given = edit[2], 0
  for age = 0, p[4] do
    local of_age = min(counts[age], units - given)
    counts[age], given = counts[age] - of_age, given + of_age
  end
  if given > 0 then return edit end
end

-- Returns the state of a log of one block. Its header has what `take.lua` needs to add an entry: the time until which the
-- key is kept, the slot of the oldest entry, the number of entries and of slots, the oldest moment, the newest entry, the
-- sum before it, and the sum before the oldest entry.
local function ring_of(head, tail, kept)
  local count = (#tail - 5) / ENTRY
  local slots = count > 1 and count + 2 + floor((count - 1) / 4) or 1
  local base, oldest = read('>I5I7', tail, 1)
  local newest, sum = read('>I7I5', tail, ENTRY * count - 6)
  local before = count > 1 and read('>I5', tail, ENTRY * (count - 1) + 1) or base
  return head .. pack('>I7I2I2I2I7I7I5I5', kept, 0, count, slots, oldest, newest, sum, before) .. tail
    .. string.rep('\0\0\0\0\0\0\0\0\0\0\0\0', slots - count)
end

-- Writes the state of a log: as a string, or as a hash if it has several blocks.
local function store_log(k, p, ttl)
  local log, key = logs[k], KEYS[k]
  local head = p.signature .. pack('>I5', min(K[k] or 0, WRAP - 1))
  if log.index == '' then
    if #log.tail == 5 then
      if values[k] or hashes[k] then try(k, 'DEL', key) end
      return
    end
    -- For longer than the entries count, so that few requests change the expiry.
    local kept = ends[k] + ceil(max(ends[k] - now, 0) / 8)
    local text = ring_of(head, log.tail, kept)
    ttl = format('%d', injected and 3600000 or max(ceil((kept - now) / 1000), 0) + 1)
    if values[k] or hashes[k] then
      try(k, 'SET', key, text, 'PX', ttl)
    elseif not try(k, 'SET', key, text, 'PX', ttl, 'NX') then
      fail(k, 'holds something else')
    end
    return
  end
  if not hashes[k] then
    if not try(k, 'DEL', key) then return end
  end
  local words = { 'h', head .. pack('>I5', log.closed) .. log.index, 't', log.tail }
  for id, text in pairs(log.changed) do
    words[#words + 1], words[#words + 2] = format('%d', id), text
  end
  if not try(k, 'HSET', key, unpack(words)) then
    -- If the user may not run HSET, restore the string, so that the log is not lost.
    -- Its header may promise an eighth more.
    if values[k] and not hashes[k] then pcall_redis('SET', key, values[k], 'PX', format('%d', ttl + ceil(ttl / 8))) end
    return
  end
  words = {}
  for id in pairs(log.removed) do
    words[#words + 1] = format('%d', id)
    if #words == 1000 then
      try(k, 'HDEL', key, unpack(words))
      words = {}
    end
  end
  if #words > 0 then try(k, 'HDEL', key, unpack(words)) end
  try(k, 'PEXPIRE', key, ttl)
end

-- Publishes a reset, as the time and the key: other processes may have cached a denial of this key, or hold leases of
-- it. Only resets are published, because a message to every process costs Redis more than a decision. Refunds need
-- none: denials are cached for a second at most.
local function tell_others(k)
  -- The channel has the same prefix as the key.
  local name = KEYS[k] .. (fields[k] or '')
  pcall_redis('PUBLISH', string.match(name, '^[^{]*rate_limit:') .. 'changed', format('%.0f ', now) .. name)
end

-- Conversion of a state to other terms, with the same results as `algorithm/conversion.rs`.

-- Returns the units that a key owes under these terms, and the fraction of a unit in parts of p[6].
local function owed(k, p, most_units)
  local a, b = A[k], B[k]
  if a < now then return 0, 0 end
  local debt, most, most_parts = a - now, most_of(most_units, p)
  if debt > most or (debt == most and b > most_parts) then debt, b = most, most_parts end
  local units, rest = muldiv(debt, p[2], p[6])
  rest = rest + b
  if rest >= p[6] then
    local below = rest % p[6]
    units, rest = units + (rest - below) / p[6], below
  end
  return units, rest
end

local function set_debt(v, p, units, rest, whole)
  if units == 0 and rest == 0 then return end
  local micros, parts = MAX_SPAN + 1, 0
  if units * p[6] / p[2] <= 4503599627370496 then
    micros, parts = muldiv(units, p[6], p[2])
    local more, remainder = muldiv(rest, p[6], whole)
    if remainder > 0 then more = more + 1 end
    local below = more % p[2]
    micros, parts = micros + (more - below) / p[2], parts + below
    if parts >= p[2] then micros, parts = micros + 1, parts - p[2] end
  end
  local most, most_parts = most_of(K[v], p)
  if micros > most or (micros == most and parts > most_parts) then
    micros, parts, cut[v] = most, most_parts, true
  end
  A[v], B[v] = now + micros, parts
end

-- By kind: returns the latest time at which the units were spent, and how many still count.
local spent = {}

spent[METER] = function(k, p, most_units)
  local units, rest = owed(k, p, most_units)
  return now, rest > 0 and units + 1 or units
end

spent[INTERVAL] = function(k, p)
  local period, tokens = interval_now(k, p)
  return max(now, period), tokens
end

spent[CLOCK] = function(k, p)
  local window, units = clock_now(k, p)
  return max(now, window), units
end

spent[OPENED] = function(k, p)
  local _, units = opened_now(k, p)
  return now, units
end

spent[LOG] = function(k, p)
  local total, newest = log_now(logs[k])
  if total == 0 or newest > now + p[3] then return now, total end
  local held = max(newest, now)
  local _, _, gone = split_by_time(logs[k], held - p[3])
  return held, max(total - gone, 0)
end

spent[COUNTER] = function(k, p)
  local window, segments = p[3], p[4]
  local segment, elapsed, passed = counter_now(k, p)
  local counts, inside = C[k], 0
  for age = 0, segments - passed - 1 do
    inside = inside + counts[age]
  end
  local leaving = passed <= segments and counts[segments - passed] or 0
  local share, rest = muldiv(leaving, window - elapsed, window)
  return max(now, start_of(segment, window, segments)), inside + share + (rest > 0 and 1 or 0)
end

-- A ban and a limit never share a key, so there is nothing to convert.
spent[STRIKES] = function() return now, 0 end

-- Charges an empty copy with units that were spent at a moment.
local function charge(v, p, at, units)
  local kind = p[1]
  if units == 0 then return end
  if kind == METER then
    set_debt(v, p, units, 0, 1)
  elseif kind == INTERVAL then
    local most = max(p[2], p[3] * floor(MAX_SPAN / p[4]))
    A[v], B[v], cut[v] = at - at % p[4], min(units, most), units > most
  elseif kind == CLOCK then
    A[v], B[v] = at - at % p[3], units
  elseif kind == OPENED then
    A[v], B[v] = at, units
  elseif kind == LOG then
    append(logs[v], at, min(units, MOST_CHARGED), WRAP, BLOCK)
  elseif kind == COUNTER then
    A[v], C[v][0] = start_of(place(at, p[3], p[4]), p[3], p[4]), units
  end
end

local function convert_log(k, old, v, p)
  local total, newest, last_units = log_now(logs[k])
  if total == 0 or newest > now + old[3] then return charge(v, p, now, total) end
  local log = copy_log(logs[k])
  local at, count = split_by_time(log, max(newest, now) - min(old[3], p[3]))
  drop(log, at, count)
  if last_units == 0 and #log.tail > 5 then
    log.tail = log.tail:sub(1, -ENTRY - 1)
    if #log.tail == 5 and log.index ~= '' then
      local last = #log.index - INDEX + 1
      log.tail = block_at(log, last)
      remove_block(log, last)
    end
  end
  logs[v] = log
end

-- The units of a segment count as spent at its last moment, or now if that is earlier.
local function convert_counter(k, old, v, p)
  local segment, _, passed = counter_now(k, old)
  local latest = max(now, start_of(segment, old[3], old[4]))
  local current = place(latest, p[3], p[4])
  for age = passed, old[4] do
    local units = C[k][age - passed]
    if units > 0 and segment >= age then
      local at = min(latest, start_of(segment - age + 1, old[3], old[4]) - 1)
      local new_age = current - place(at, p[3], p[4])
      if new_age <= p[4] then
        A[v], C[v][new_age] = start_of(current, p[3], p[4]), C[v][new_age] + units
      end
    end
  end
end

local function convert(k, old, v, p)
  local kind = p[1]
  A[v], B[v], K[v], C[v], logs[v] = 0, 0, 0, nil, nil
  if kind == METER then K[v] = max(K[k] or 0, p[9]) end
  if kind == COUNTER then C[v] = zeros(p[4]) end
  if kind == LOG then logs[v], K[v] = empty_log(), max(K[k] or 0, p[4] == 1 and p[5] or 0) end
  if kind == METER and old[1] == METER then
    local units, rest = owed(k, old, K[v])
    set_debt(v, p, units, rest, old[6])
  elseif kind ~= old[1] then
    local at, units = spent[old[1]](k, old, max(K[k] or 0, p[#p]))
    -- A bucket may owe more than any quota.
    if kind == METER then K[v] = max(K[v], units) end
    charge(v, p, at, units)
  elseif kind == OPENED then
    local opened, units = opened_now(k, old)
    charge(v, p, now < opened + p[3] and opened or now, units)
  elseif kind == LOG then
    convert_log(k, old, v, p)
  elseif kind == COUNTER then
    convert_counter(k, old, v, p)
  elseif kind == STRIKES then
    local since, marks = strikes_now(k, old)
    if marks > 0 then
      A[v], B[v] = (marks % 2 == 1 or now < since + p[3]) and since or now, marks
    end
  else
    charge(v, p, spent[kind](k, old))
  end
end

-- Loads the state of a key for a limit, and returns its terms. Only a debt above the largest quota that the limit has had
-- is attributed to a clock that stepped back, whichever terms the state has.
local function load_for(k, p)
  if not terms[k] then load(k, p) end
  if terms[k][1] == METER then K[k] = max(K[k], p[#p]) end
  return terms[k]
end

-- Returns the state after units are charged that were spent already, whatever the quota is, and how many of them are
-- counted. `ceiling` is the largest quota of the limit.
local function owe(k, p, units, ceiling)
  local kind, most = p[1], MOST_CHARGED
  if kind == STRIKES then return nil, 0 end
  local _, has = spent[kind](k, p, K[k])
  if kind == INTERVAL then most = min(most, max(p[2], p[3] * floor(MAX_SPAN / p[4]))) end
  local counted = max(min(units, most - has), 0)
  if kind == METER then
    local a, b = meter_now(k, p)
    -- No longer than the longest window.
    local span = MAX_SPAN - (a - now)
    if span * p[2] / p[6] < most then
      local room, rest = muldiv(span, p[2], p[6])
      if rest < b then room = room - ceil((b - rest) / p[6]) end
      counted = max(min(counted, room), 0)
    end
    local micros, sum = muldiv(counted, p[6], p[2])
    micros, sum = a + micros, b + sum
    if sum >= p[2] then micros, sum = micros + 1, sum - p[2] end
    -- So that the debt is not mistaken for a clock that stepped back.
    return { micros, sum, micros + 1, has + counted }, counted
  elseif kind == INTERVAL then
    local period = interval_now(k, p)
    return interval_edit(p, period, has + counted), counted
  elseif kind == COUNTER then
    local segment, _, passed = counter_now(k, p)
    return counter_edit(k, p, segment, passed, 0, (passed == 0 and C[k][0] or 0) + counted), counted
  elseif kind == LOG then
    if counted == 0 then return nil, 0 end
    local log, window = logs[k], p[3]
    local total, newest = log_now(log)
    ceiling = max(ceiling, K[k] or 0)
    if newest > now + window then
      return { collapse = true, add = counted, total = total, ceiling = ceiling, most = WRAP, ends = now + window }, counted
    end
    local held, block, count = max(newest, now), 1, 0
    if total > 0 then block, count = split_by_time(log, held - window) end
    return {
      empty = total == 0, block = block, count = count, at = held, add = counted, ceiling = ceiling, most = WRAP,
      ends = held + window, beyond = has + counted - 2 * ceiling,
    }, counted
  end
  local window = kind == CLOCK and clock_now(k, p) or opened_now(k, p)
  return { window, has + counted, window + p[3] }, counted
end

-- Returns the index of the state of a key under these terms: the key itself, or a converted copy (a negative index).
local copies = 0

local function prepare(k, p)
  load_for(k, p)
  if terms[k] == REST then
    A[k], B[k], K[k], terms[k] = 0, 0, 0, p
    C[k] = p[1] == COUNTER and zeros(p[4]) or nil
    logs[k] = p[1] == LOG and empty_log() or nil
    return k
  end
  if terms[k].signature == p.signature then return k end
  copies = copies - 1
  convert(k, terms[k], copies, p)
  return copies
end

-- Returns how many of the units charged at a moment can still count under other terms than those of the state. `before`
-- is the debt before that charge.
local function still_counts(p, held, units, at, before)
  local kind = p[1]
  if p.signature == held.signature then return units end
  if now < at then return 0 end
  if kind == METER then
    if (now - at) * p[2] / p[6] > 2 * (units + before) + 2 then return 0 end
    return max(units - max(muldiv(now - at, p[2], p[6]) - before, 0), 0)
  elseif kind == INTERVAL then
    return max(units - max(((now - now % p[4]) - (at - at % p[4])) / p[4] * p[3] - before, 0), 0)
  end
  local counts
  if kind == CLOCK then
    counts = now - now % p[3] == at - at % p[3]
  elseif kind == COUNTER then
    counts = place(now, p[3], p[4]) - place(at, p[3], p[4]) <= p[4]
  else
    counts = now - at < p[3]
  end
  return counts and units or 0
end

local function write(k, p, edit, from)
  if cut[from] then return end
  if p[1] == LOG then
    if from ~= k then logs[k], K[k] = logs[from], K[from] end
    write_log(k, p, edit)
    ends[k] = edit.ends
  else
    if p[1] == COUNTER then A[k], C[k] = edit[1], edit[2] else A[k], B[k] = edit[1], edit[2] end
    if p[1] == METER then K[k] = max(K[k] or 0, p[9], edit[4] or 0) end
    ends[k] = edit[3]
  end
  terms[k], dirty[k] = p, p
end

local function is_variant(p, signature)
  for index = 1, p.variants and #p.variants or 0 do
    if p.variants[index] == signature then return true end
  end
  return false
end

-- Replaces the state by its converted copy after a denial, so that the key waits by the new terms. Copies that cannot
-- hold all spent units are exempt, and variants of one limit: each conversion can date charges to now, so a client that
-- alternates between variants would wait ever longer.
local function move(k, p, from, cost)
  if from == k or cost == 0 or failed[k] then return end
  if cut[from] or is_variant(p, terms[k].signature) then
    -- If the clock has stepped back, correct the state, so that the key does not wait for the clock to catch up.
    local _, edit = judge[terms[k][1]](k, terms[k], 0, 0)
    if edit then write(k, terms[k], edit, k) end
    return
  end
  if p[1] == LOG then
    logs[k], K[k] = logs[from], K[from]
    local _, newest = log_now(logs[k])
    ends[k], dirty[k] = newest + p[3], p
  else
    A[k], B[k], C[k], K[k] = A[from], B[from], C[from], K[from]
    local last = A[k] + 1
    if p[1] == INTERVAL then
      last = A[k] + ceil(B[k] / p[3]) * p[4]
    elseif p[1] == CLOCK or p[1] == OPENED then
      last = A[k] + p[3]
    elseif p[1] == COUNTER then
      last = start_of(place(A[k], p[3], p[4]) + p[4] + 1, p[3], p[4])
    elseif p[1] == STRIKES then
      last = A[k] + max(p[3], p[4])
    end
    ends[k], dirty[k] = last, p
  end
  terms[k] = p
end

-- Returns a number of units as the cost of these terms, and its parts.
local function cost_of(p, units)
  if p[1] ~= METER then return units, 0 end
  -- Longer than any bucket takes to refill: the exact number does not matter.
  if units * p[6] / p[2] > 4503599627370496 then return 4503599627370496, 0 end
  return muldiv(units, p[6], p[2])
end

-- Gives back units of the newest charges, under the terms of the state. A queue gives back nothing, because later
-- requests have their delays.
local function credit(k, p, units)
  local held = load_for(k, p)
  if held == REST or failed[k] or units == 0 or (p[1] == METER and p[5] >= 0) then return end
  if held[1] == LOG then return credit_log(k, held, units) end
  local edit
  if held[1] == COUNTER then
    edit = credit_counter(k, held, units)
  elseif held[1] == INTERVAL then
    -- If the clock has stepped back, the newest period is after now, and its units have not come back.
    local period, tokens = interval_now(k, held)
    if tokens > 0 then edit = interval_edit(held, period, max(tokens - units, 0)) end
  else
    local cost, parts = cost_of(held, units)
    -- The clock may have stepped back before the window that counts.
    local at = held[1] == CLOCK and clock_now(k, held) or now
    edit = give_back[held[1]](k, held, cost, parts, at)
  end
  if edit then write(k, held, edit, k) end
end

-- Gives back units that were charged at a moment: the least that counts under the caller's terms and under all other
-- terms that may have counted the charge. Their number is at `q[others_at]`, and their indexes follow.
local function refund(k, p, units, charged_at, others_at, before, before_parts)
  local held = load_for(k, p)
  if held.signature ~= p.signature then before = nil end
  if held == REST or failed[k] or (p[1] == METER and p[5] >= 0 and not before) then return end
  -- The refill pays the earlier debt first.
  local owed_before = before or 0
  if before and held[1] == METER then
    owed_before = before * held[2] / held[6] < 4503599627370496 and (muldiv(before, held[2], held[6])) or 0
  end
  local given = still_counts(p, held, units, charged_at, owed_before)
  for other = others_at + 1, others_at + q[others_at] do
    given = min(given, still_counts(limits[q[other]], held, units, charged_at, owed_before))
  end
  if given > 0 and held[1] == LOG then
    give_back_log(k, held, given, charged_at)
  elseif given > 0 then
    local cost, parts = cost_of(held, given)
    local edit = give_back[held[1]](k, held, cost, parts, charged_at, before, before_parts)
    if edit then write(k, held, edit, k) end
  end
end

-- Returns how many of these charges, from the first, must be given back so that a request is allowed, or 0. Changes
-- nothing. Their units and times begin at `q[first]`.
local function fewest(k, p, cost, parts, first, charges)
  local held = load_for(k, p)
  local a, b, most, last, changed, counts, log = A[k], B[k], K[k], ends[k], dirty[k], C[k], logs[k]
  if log then logs[k] = copy_log(log) end
  local enough, others_at = 0, first + 2 * charges
  for charge = 1, charges do
    refund(k, p, q[first + 2 * charge - 2], q[first + 2 * charge - 1], others_at)
    if not failed[k] and judge[p[1]](prepare(k, p), p, cost, parts) then
      enough = charge
      break
    end
  end
  A[k], B[k], K[k], ends[k], dirty[k], C[k], logs[k], terms[k] = a, b, most, last, changed, counts, log, held
  return enough
end

local out = { now, 0 }
local size = 2

-- The most units that a stored state can hold, which is more than any quota.
local MOST = 1099511627775

local function counts_text(p, start, counts)
  local pair, _, cycle = pairs_of(p)
  local segment, total, words = place(start, p[3], p[4]), 0, {}
  for age = p[4], 0, -1 do
    local units = min(counts[age], MOST)
    total = total + units
    -- The newest count is always stored, because `take.lua` expects it at the end.
    if units > 0 or age == 0 then words[#words + 1] = pack(pair, (segment - age) % cycle, units) end
  end
  local text = p.signature .. pack('>I7', segment)
  if p[4] > 1 then text = text .. pack('>I5', min(total, MOST)) end
  return text .. table.concat(words)
end

local function text_of(k, p, a, b)
  if p[1] == COUNTER then return counts_text(p, a, C[k]) end
  if p[1] == CLOCK or p[1] == OPENED then return p.signature .. pack('>I7I5', a, min(b, MOST)) end
  if p[1] ~= METER then return p.signature .. pack('>I7I7', a, b) end
  if p[2] > 1 then return p.signature .. pack('>I5I7I5', K[k] or 0, a, b) end
  return p.signature .. pack('>I5I7', K[k] or 0, a)
end

-- Adds the state of a key before the change, or the decision of a log, to the reply.
local function tell(k, p, answer)
  size = size + 1
  if p[1] == LOG then
    out[size] = answer and pack('>I1I5I7I7', answer[1], answer[2], answer[3], answer[4]) or ''
    return
  end
  local a, b = A[k], B[k]
  if p[1] == METER and a >= now then
    a, b = meter_now(k, p)
  end
  out[size] = text_of(k, p, a, b)
end

local at = 1
while q[at] do
  local op, hits = q[at], q[at + 1]
  at = at + 2
  size = size + 1
  local verdict_at = size
  if op == TAKE and hits == 1 then
    -- The common case: one hit needs no tables.
    local p, k = limits[q[at]], q[at + 1]
    local from = prepare(k, p)
    local pass, edit, answer = judge[p[1]](from, p, q[at + 2], q[at + 3])
    tell(from, p, answer)
    if edit and not failed[k] then
      write(k, p, edit, from)
    elseif not pass then
      move(k, p, from, q[at + 2] + q[at + 3])
    end
    out[verdict_at] = pass and 1 or 0
    at = at + 4
  elseif op == TAKE or op == LOOK then
    local all, edits, passes, froms = true, {}, {}, {}
    for hit = 1, hits do
      local p, k = limits[q[at]], q[at + 1]
      local from = prepare(k, p)
      local pass, edit, answer = judge[p[1]](from, p, q[at + 2], q[at + 3])
      tell(from, p, answer)
      edits[hit], passes[hit], froms[hit] = edit or false, pass, from
      if not pass or failed[k] then all = false end
      at = at + 4
    end
    if op == TAKE then
      for hit = 1, hits do
        local first = at - 4 * (hits - hit + 1)
        local p, k = limits[q[first]], q[first + 1]
        -- A hit without a cost writes nothing, unless it is denied.
        local takes = all and q[first + 2] + q[first + 3] > 0
        if edits[hit] and (takes or not passes[hit]) and not failed[k] then
          write(k, p, edits[hit], froms[hit])
        elseif not passes[hit] then
          move(k, p, froms[hit], q[first + 2] + q[first + 3])
        end
      end
    end
    out[verdict_at] = all and 1 or 0
  elseif op == SLICE then
    -- One hit with several costs to try, the largest first.
    local p, k, taken = limits[q[at]], q[at + 1], 0
    local from = prepare(k, p)
    local answer
    for choice = 1, hits do
      local pass, edit
      pass, edit, answer = judge[p[1]](from, p, q[at + 2 * choice], q[at + 2 * choice + 1])
      if (pass and not failed[k]) or choice == hits then
        tell(from, p, answer)
        if pass and not failed[k] then taken = choice end
        if edit and not failed[k] then write(k, p, edit, from) end
        break
      end
    end
    out[verdict_at] = taken
    at = at + 2 + 2 * hits
  elseif op == WITHOUT then
    -- One hit, and charges of its key.
    out[verdict_at] = fewest(q[at + 1], limits[q[at]], q[at + 2], q[at + 3], at + 4, hits)
    at = at + 4 + 2 * hits
    at = at + 1 + q[at]
  elseif op == CREDIT then
    for hit = 1, hits do
      credit(q[at + 1], limits[q[at]], q[at + 2])
      at = at + 3
    end
    out[verdict_at] = 1
  elseif op == REFUND or op == UNDO or op == SETTLE or op == OWE then
    -- A reservation is settled once, and not after it has expired, by one of the other operations. Its marker outlives it
    -- by a minute, because the clock may step back. Units that were charged before a reset are not given back: the key has
    -- its whole quota since.
    local settles, reset_at = 1, 0
    if op == SETTLE then
      local marker, expires_at = q[at], q[at + 1]
      reset_at = tonumber(values[q[at + 2]] or 0)
      op, at = q[at + 3], at + 4
      if now >= expires_at then
        settles = 2
      elseif values[marker] then
        settles = 0
      else
        local ttl = injected and 3600000 or ceil((expires_at - now) / 1000) + 60000
        values[marker] = '1'
        if not try(marker, 'SET', KEYS[marker], '1', 'PX', format('%d', ttl)) then settles = 0 end
      end
    end
    if op == OWE then
      for hit = 1, hits do
        local p, k, counted = limits[q[at]], q[at + 1], 0
        local from = prepare(k, p)
        local _, _, answer = judge[p[1]](from, p, 0, 0)
        tell(from, p, answer)
        if settles == 1 and not failed[k] then
          -- A copy that cannot hold all spent units must not replace the state.
          local held = p
          if cut[from] then from, held = k, terms[k] end
          local edit
          edit, counted = owe(from, held, q[at + 2], p[#p])
          if edit then write(k, held, edit, from) end
        end
        size = size + 1
        out[size], at = counted, at + 3
      end
    else
      for hit = 1, hits do
        local p, k, units, charged_at = limits[q[at]], q[at + 1], q[at + 2], q[at + 3]
        local before, before_parts
        if op == UNDO then
          before, before_parts = q[at + 4], q[at + 5]
          at = at + 2
        end
        if settles == 1 and charged_at > reset_at then refund(k, p, units, charged_at, at + 4, before, before_parts) end
        at = at + 5 + q[at + 4]
      end
    end
    out[verdict_at] = settles
  else
    for hit = 1, hits do
      local k = q[at + 1]
      if not terms[k] then load(k, limits[q[at]]) end
      if not failed[k] then
        local removed = fields[k] and try(k, 'HDEL', KEYS[k], fields[k]) or not fields[k] and try(k, 'DEL', KEYS[k])
        if removed == 1 or dirty[k] then tell_others(k) end
        values[k], terms[k], dirty[k], hashes[k] = false, REST, nil, nil
        local marker = q[at + 2]
        if marker > 0 then
          values[marker] = format('%.0f', now)
          try(marker, 'SET', KEYS[marker], values[marker], 'PX', RESERVED_FOR)
        end
      end
      at = at + 3
    end
    out[verdict_at] = 1
  end
end

-- Removes expired states from a few fields of a hash at random: more than one request can add. If the hash has the
-- signature of earlier settings, looks at all fields, and replaces the signature once no state uses it.
local function sweep(k, p, is_renewed)
  local key = KEYS[k]
  local signature = hash_signature[key]
  local is_other = is_renewed and p.signature ~= signature
  local found, dead, uses = try(k, 'HRANDFIELD', key, is_other and '128' or '4', 'WITHVALUES'), {}, 0
  if not found then return end
  for index = 1, #found, 2 do
    local text, field = found[index + 1], found[index]
    local is_short = byte(text) == 255
    if is_short then text = signature .. text:sub(2) end
--@expiry
    -- A clock that tests set may step back.
    if injected then over = over + 86400000000 end
    if field ~= '' and over < now then
      dead[#dead + 1] = field
    elseif is_short then
      uses = uses + 1
    end
  end
  if #dead > 0 then try(k, 'HDEL', key, unpack(dead)) end
  if is_other and uses == 0 and #found < 256 then
    hash_signature[key] = p.signature
    try(k, 'HSET', key, '', pack('>I7', kept_until[key]) .. p.signature)
  end
end

-- Writes the state of a key to its field.
local function store_field(k, p, text)
  local key, last = KEYS[k], ends[k]
  hash_signature[key] = hash_signature[key] or p.signature
  local signature = hash_signature[key]
  if text:sub(1, #signature) == signature then text = '\255' .. text:sub(#signature + 1) end
  if last <= (kept_until[key] or 0) then
    if try(k, 'HSET', key, fields[k], text) and not values[k] then sweep(k, p, false) end
    return
  end
  -- For longer than this state lasts, so that few requests change the expiry of the hash.
  last = last + max(last - now, 10000000)
  if not try(k, 'HSET', key, '', pack('>I7', last) .. signature, fields[k], text) then return end
  kept_until[key] = last
  local ttl = format('%d', injected and 3600000 or ceil((last - now) / 1000) + 1)
  if try(k, 'PEXPIRE', key, ttl) then sweep(k, p, true) end
end

for k, p in pairs(dirty) do
  if not failed[k] then
    local ttl = format('%d', injected and 3600000 or max(ceil((ends[k] - now) / 1000), 0) + 1)
    if fields[k] then
      store_field(k, p, text_of(k, p, A[k], B[k]))
    elseif p[1] == LOG then
      store_log(k, p, ttl)
    elseif values[k] or hashes[k] then
      try(k, 'SET', KEYS[k], text_of(k, p, A[k], B[k]), 'PX', ttl)
    elseif not try(k, 'SET', KEYS[k], text_of(k, p, A[k], B[k]), 'PX', ttl, 'NX') then
      -- The key exists, but was not read: it holds another type.
      fail(k, 'holds something else')
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
