-- Decides a batch of requests in order, each all or nothing.
--
-- KEYS: the distinct keys of the batch. ARGV[1]: {now or 0, limits, requests} in MessagePack, as script.rs writes
-- it. Every number is an integer below 2^53. The answers are computed in Rust from the state that was seen here,
-- so this script decides, writes, and tells what it saw; only the log, which is too long to tell, answers itself.
--
-- States are kept in Lua until the end, so that a key which is asked for a hundred times is written once. An
-- error in one key spoils the requests that touch this key and no others.

local floor, ceil, max, min, format = math.floor, math.ceil, math.max, math.min, string.format
local call, pcall_redis = redis.call, redis.pcall
local pack, read = struct.pack, struct.unpack
local asked = cmsgpack.unpack(ARGV[1])
local now, limits, q = asked[1], asked[2], asked[3]
local injected = now > 0
if not injected then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local values = call('MGET', unpack(KEYS))

local METER, INTERVAL, CLOCK, OPENED, LOG, COUNTER, STRIKES = 1, 2, 3, 4, 5, 6, 7
-- A bucket whose requests wait, in a signature.
local QUEUE = 8
local TAKE, LOOK, REFUND, RESET, SLICE, UNDO = 0, 1, 2, 3, 4, 5

-- Of each key: the first two numbers of its state, the counts of a counter, the largest quota (in units) of the limits
-- that wrote a bucket or a log which counts denials, and the terms under which all of these were written. When the state
-- may be forgotten, and which terms wait to be written.
local A, B, C, K, terms, ends, dirty = {}, {}, {}, {}, {}, {}, {}
-- The entries of a log that was converted and is not written yet.
local entries = {}
-- Copies that have no room for all that was spent. They are full, and must not replace the state.
local cut = {}
-- Keys that are lists of ours.
local lists = {}
local failed = {}

local function fail(k, why)
  if not failed[k] then
    failed[k] = why
  end
end

local function is_count(n)
  return n and n >= 0 and n < 9007199254740992 and n % 1 == 0
end

-- Terms tell what the numbers of a state mean, by a signature: the kind and the numbers that count units in time, as
-- `script.rs` writes them. Quotas are no part of it: they do not change what was spent.
local known = {}
for index = 1, #limits do
  local p = limits[index]
  p.signature = table.remove(p)
  if type(p[#p]) == 'table' then p.variants = table.remove(p) end
  known[p.signature] = known[p.signature] or p
end

-- Terms from the beginning of a state, with all that a limit says but for its quota; and where the signature ends.
local function terms_of(text)
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
  local p = known[signature]
  if p then return p, length end
  local x, y, units, at = 0, 1, 1, 2
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
    elseif kind == CLOCK or kind == OPENED or kind == LOG then
      p = { kind, 0, x, 0, 0 }
    end
  end
  if not p or x == 0 or y == 0 or units == 0 or not is_count(x) or not is_count(y) then return nil end
  p.signature = signature
  known[signature] = p
  return p, length
end

-- The terms of a key that has spent nothing.
local REST = {}

local function try(k, ...)
  local reply = pcall_redis(...)
  if type(reply) == 'table' and reply.err then
    -- A replica can decide nothing, and has written nothing.
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

-- How the counts of a counter are kept: the segment, modulo a number that is larger than the segments, and its units.
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
  -- The units of all come next.
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

-- A state is its signature and its numbers; that of a log is a list which ends with the sum and the window.
local function load(k)
  A[k], B[k], K[k], terms[k] = 0, 0, 0, REST
  local value = values[k]
  if not value then
    local tail = pcall_redis('LRANGE', KEYS[k], -1, -1)
    if tail.err then return spoil(k) end
    if not tail[1] then return end
    local window, most = tail[1]:match('^=%d+ (%d+) ?(%d*)$')
    window, most = tonumber(window), tonumber(most) or 0
    if not is_count(window) or not is_count(most) then return spoil(k) end
    local p = terms_of(window < 281474976710656 and pack('>I1I6', LOG, window) or pack('>I1I7', LOG + 16, window))
    if not p then return spoil(k) end
    terms[k], lists[k], K[k] = p, true, most
    return
  end
  local p, length = terms_of(value)
  if not p or p[1] == LOG then return spoil(k) end
  if p[1] == COUNTER then return load_counter(k, p, value, length + 1) end
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

-- The quotient of a * b by c and its remainder, exactly, for numbers below 2^51 (a: 2^53) and a quotient below 2^53.
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

-- Whether a * b < c * d, exactly, for a and c up to 2^33 and b and d up to 2^51.
local function wide(a, b)
  local b0 = b % 1048576
  local rest = (b - b0) / 1048576
  local b1 = rest % 1048576
  local b2 = (rest - b1) / 1048576
  local x0 = a * b0
  local d0 = x0 % 1048576
  local x1 = a * b1 + (x0 - d0) / 1048576
  local d1 = x1 % 1048576
  return a * b2 + (x1 - d1) / 1048576, d1, d0
end

local function product_less(a, b, c, d)
  local left, right = a * b, c * d
  if left < 9007199254740992 and right < 9007199254740992 then
    return left < right
  end
  local l2, l1, l0 = wide(a, b)
  local r2, r1, r0 = wide(c, d)
  if l2 ~= r2 then return l2 < r2 end
  if l1 ~= r1 then return l1 < r1 end
  return l0 < r0
end

-- The segment a moment lies in, and how far into it, in segments-ths of a microsecond.
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

-- The first microsecond of a segment: from there, `place` finds it again.
function start_of(segment, window, segments)
  local within = segment % segments
  local rest = window % segments
  return (segment - within) / segments * window + within * ((window - rest) / segments) + ceil(within * rest / segments)
end

-- Each judges a cost: whether it passes, and the state to write, if any.
local judge, give_back = {}, {}

-- Windows and periods are identified by their start.

local MAX_SPAN = 1125899906842624

-- The largest debt of a key that has owed at most this many units. A larger one means that the clock stepped back.
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

-- What was taken comes back by itself as time passes, and is not given back a second time. Where it is known how much
-- was owed before it was taken (`before`, and parts), what came back until then was not the taker's.
give_back[METER] = function(k, p, cost, parts, at, before, before_parts)
  if now < at then return end
  local a, b = meter_now(k, p)
  if p[5] >= 0 then
    -- A queue has given turns. One can be taken back if none came after it.
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

-- A moment and what it began, in marks: twice the strikes that count together, and one more in a ban.
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

-- The counts as of a segment, with the one of that age replaced.
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
  local passes = cost == 0
    or (room >= 0 and product_less(leaving, window - elapsed, room + 1, window))
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

-- The log is a list: entries of a moment and its units, oldest first, then the units of all.

local CHUNK = 64

local function read_entry(text)
  local at = tonumber(text)
  if at then return at, 1 end
  local moment, units = text:match('^(%d+):(%d+)$')
  return tonumber(moment), tonumber(units)
end

local function entry_text(at, units)
  if units == 1 then return at end
  return format('%.0f:%.0f', at, units)
end

-- Visits entries from the oldest on until told to stop.
local function visit_log(k, visit)
  if entries[k] then
    for index = 1, #entries[k] do
      if not visit(entries[k][index][1], entries[k][index][2]) then return end
    end
    return
  end
  local from = 0
  while true do
    local chunk = try(k, 'LRANGE', KEYS[k], from, from + CHUNK - 1)
    if not chunk then return end
    for index = 1, #chunk do
      if chunk[index]:find('^=') then return end
      local at, units = read_entry(chunk[index])
      if not at then fail(k, 'holds something else') return end
      if not visit(at, units) then return end
    end
    if #chunk < CHUNK then return end
    from = from + CHUNK
  end
end

-- The units of all entries and the newest moment; no units is an empty log.
local function log_now(k)
  if entries[k] then
    local total, last = 0, nil
    for index = 1, #entries[k] do
      last = entries[k][index]
      total = total + last[2]
    end
    if not last then return 0, 0, 0 end
    return total, last[1], last[2], true
  end
  local tail = try(k, 'LRANGE', KEYS[k], -2, -1)
  if not tail or #tail == 0 then return 0, 0, 0 end
  local total = tail[2] and tonumber(tail[2]:match('^=(%d+) '))
  local newest, last_units = read_entry(tail[1])
  if not total or not newest then
    fail(k, 'holds something else')
    return 0, 0, 0
  end
  if total == 0 then return 0, 0, 0, true end
  return total, newest, last_units, true
end

-- The last element of a log: the units of all, the window, and the largest quota of those that count denials. A limit
-- with a lower quota must not forget what counts for another.
local function log_sum(k, p, total)
  local most = K[k] or 0
  if most > 0 then return format('=%.0f %d %d', total, p[3], most) end
  return format('=%.0f %d', total, p[3])
end

-- Whether it passes, what to write, and the answer: outcome (1 passes, 0 waits, 2 never), remaining, retry, reset.
judge[LOG] = function(k, p, cost)
  local limit, window, counts_denied, ceiling = p[2], p[3], p[4] == 1, max(p[5], K[k] or 0)
  local total, newest, last_units, exists = log_now(k)
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
  local expired, gone = 0, 0
  if total > 0 and newest + window <= held then
    expired, gone = -1, total
  elseif total > 0 then
    visit_log(k, function(at, units)
      if at + window > held then return false end
      expired, gone = expired + 1, gone + units
      return true
    end)
  end
  local units = max(total - gone, 0)
  local remaining = max(limit - units, 0)
  local until_gone = held + window - now
  local edit = {
    forget = expired, total = units, at = held, add = cost, exists = exists, newest = newest,
    last_units = last_units, ceiling = ceiling, ends = held + window,
  }
  if cost > 0 and cost <= remaining then return true, edit, { 1, remaining - cost, 0, until_gone } end
  local reset_after = 0
  if units > 0 then
    local last = newest
    if last_units == 0 then
      visit_log(k, function(at, left)
        if left > 0 then last = at end
        return true
      end)
    end
    reset_after = max(last + window - now, 0)
  end
  if cost == 0 then return true, nil, { 1, remaining, 0, reset_after } end
  if cost > limit then return false, nil, { 2, remaining, 0, reset_after } end
  local left = counts_denied and units + cost or units
  local seen, trim, trimmed, retry = 0, 0, 0, nil
  if expired >= 0 then
    visit_log(k, function(at, entry_units)
      seen = seen + 1
      if seen <= expired then return true end
      left = max(left - entry_units, 0)
      if left >= ceiling then
        trim, trimmed = trim + 1, trimmed + entry_units
        if at == newest then edit.newest = 0 end
      end
      if left + cost <= limit then retry = max(at + window - now, 0) end
      return not retry
    end)
  end
  retry = retry or until_gone
  if not counts_denied then return false, nil, { 0, remaining, retry, reset_after } end
  if expired >= 0 then edit.forget = expired + trim end
  edit.total = max(units - trimmed, 0)
  return false, edit, { 0, max(limit - units - cost, 0), retry, until_gone }
end

local function write_log(k, p, edit)
  local key = KEYS[k]
  if p[4] == 1 then K[k] = max(K[k] or 0, edit.ceiling) end
  local ttl = format('%d', injected and 3600000 or ceil((edit.ends - now) / 1000) + 1)
  if edit.collapse then
    local total = min(edit.total + edit.add, max(edit.ceiling, edit.total))
    if not try(k, 'DEL', key) then return end
    if not try(k, 'RPUSH', key, entry_text(now, total), log_sum(k, p, total)) then return end
    try(k, 'PEXPIRE', key, ttl)
    return
  end
  if edit.forget < 0 then
    if not try(k, 'DEL', key) then return end
    edit.exists, edit.newest = false, 0
  elseif edit.forget > 0 then
    if not try(k, 'LPOP', key, format('%d', edit.forget)) then return end
  end
  local total, added = edit.total, nil
  if edit.exists and edit.newest == edit.at and (edit.forget >= 0) then
    local units = min(edit.last_units + edit.add, max(edit.ceiling, edit.last_units))
    total = total - edit.last_units + units
    added = try(k, 'LSET', key, -2, entry_text(edit.at, units))
  elseif edit.exists then
    total = total + edit.add
    added = try(k, 'LSET', key, -1, entry_text(edit.at, edit.add)) and try(k, 'RPUSH', key, '=0')
  else
    total = total + edit.add
    added = try(k, 'RPUSH', key, entry_text(edit.at, edit.add), '=0')
  end
  if added then
    try(k, 'LSET', key, -1, log_sum(k, p, total))
    try(k, 'PEXPIRE', key, ttl)
  end
end

local function give_back_log(k, p, cost, charged_at)
  local total = log_now(k)
  if total == 0 then return end
  local index, found, left = -2, nil, nil
  while not found do
    local chunk = try(k, 'LRANGE', KEYS[k], index - CHUNK + 1, index)
    if not chunk then return end
    for back = #chunk, 1, -1 do
      local at, units = read_entry(chunk[back])
      if not at then
        fail(k, 'holds something else')
        return
      elseif at == charged_at then
        found, left = index - (#chunk - back), units
        break
      elseif at < charged_at then
        return
      end
    end
    if not found and #chunk < CHUNK then return end
    index = found and index or index - CHUNK
  end
  local given = min(cost, left)
  if given > 0 and try(k, 'LSET', KEYS[k], found, entry_text(charged_at, left - given)) then
    try(k, 'LSET', KEYS[k], -1, log_sum(k, p, total - given))
  end
end

-- Other processes may remember that this key is denied. Only resets are published, because a message to every process costs
-- Redis more than a decision: a denial is remembered for a second at most, so a refund is noticed soon without one.
local function tell_others(k)
  -- The channel has the prefix of the key, if there is one.
  pcall_redis('PUBLISH', string.match(KEYS[k], '^[^{]*rate_limit:') .. 'changed', KEYS[k])
end

-- Conversion of a state to other terms: `algorithm/conversion.rs`, number by number.

-- The units that are owed under these terms, and the rest of one in parts of p[6].
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

-- Each tells when units can have been spent at the latest, and how many count.
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
  local total, newest = log_now(k)
  if total == 0 or newest > now + p[3] then return now, total end
  local held, gone = max(newest, now), 0
  if newest + p[3] <= held then return held, 0 end
  visit_log(k, function(at, units)
    if at + p[3] > held then return false end
    gone = gone + units
    return true
  end)
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

-- Strikes and limits have different names.
spent[STRIKES] = function() return now, 0 end

-- Charges the copy, which is at rest, with units that were spent at a moment.
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
    entries[v] = { { at, units } }
  elseif kind == COUNTER then
    A[v], C[v][0] = start_of(place(at, p[3], p[4]), p[3], p[4]), units
  end
end

local function convert_log(k, old, v, p)
  local total, newest = log_now(k)
  if total == 0 or newest > now + old[3] then return charge(v, p, now, total) end
  local held, window, kept = max(newest, now), min(old[3], p[3]), {}
  visit_log(k, function(at, units)
    if units > 0 and at + window > held then kept[#kept + 1] = { at, units } end
    return true
  end)
  entries[v] = kept
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
  A[v], B[v], K[v], C[v], entries[v] = 0, 0, 0, nil, nil
  if kind == METER then K[v] = max(K[k] or 0, p[9]) end
  if kind == COUNTER then C[v] = zeros(p[4]) end
  if kind == LOG then entries[v], K[v] = {}, max(K[k] or 0, p[4] == 1 and p[5] or 0) end
  if kind == METER and old[1] == METER then
    local units, rest = owed(k, old, K[v])
    set_debt(v, p, units, rest, old[6])
  elseif kind ~= old[1] then
    local at, units = spent[old[1]](k, old, max(K[k] or 0, p[#p]))
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

-- Where to read the state of a key under these terms: where it is, or in a copy.
local copies = 0

local function prepare(k, p)
  if not terms[k] then load(k) end
  if terms[k] == REST then
    A[k], B[k], K[k], terms[k] = 0, 0, 0, p
    C[k] = p[1] == COUNTER and zeros(p[4]) or nil
    return k
  end
  if terms[k].signature == p.signature then return k end
  copies = copies - 1
  convert(k, terms[k], copies, p)
  return copies
end

-- Of units charged at a moment, when others were owed already, the most that can still count under terms other than those
-- of the state.
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

-- Writes a log that was converted.
local function write_entries(k, p, copy)
  if not try(k, 'DEL', KEYS[k]) then return end
  values[k], dirty[k], lists[k], K[k] = false, nil, true, K[copy]
  local log, total, words = entries[copy], 0, {}
  for index = 1, #log do
    total = total + log[index][2]
    words[#words + 1] = entry_text(log[index][1], log[index][2])
    if #words == 1000 or index == #log then
      if not try(k, 'RPUSH', KEYS[k], unpack(words)) then return end
      words = {}
    end
  end
  if #log > 0 then try(k, 'RPUSH', KEYS[k], log_sum(k, p, total)) end
end

local function write(k, p, edit, from)
  if cut[from] then return end
  if p[1] == LOG then
    if from ~= k then write_entries(k, p, from) end
    if not failed[k] then write_log(k, p, edit) end
    lists[k] = true
  else
    if p[1] == COUNTER then A[k], C[k] = edit[1], edit[2] else A[k], B[k] = edit[1], edit[2] end
    if p[1] == METER then K[k] = max(K[k] or 0, p[9]) end
    ends[k], dirty[k] = edit[3], p
  end
  terms[k] = p
end

local function is_variant(p, signature)
  for index = 1, p.variants and #p.variants or 0 do
    if p.variants[index] == signature then return true end
  end
  return false
end

-- Replaces the state by the converted copy when a request was denied, so that its wait is that of the new terms. Not
-- between variants of one limit: a client that alternates between them would have its charges dated to now each time.
local function move(k, p, from, cost)
  if from == k or cost == 0 or failed[k] or cut[from] then return end
  if is_variant(p, terms[k].signature) then
    -- A clock that has stepped back is noted, so that the key does not wait for it to catch up.
    local _, edit = judge[terms[k][1]](k, terms[k], 0, 0)
    if edit then write(k, terms[k], edit, k) end
    return
  end
  if p[1] == LOG then
    local log = entries[from]
    write_entries(k, p, from)
    if #log > 0 and not failed[k] then
      local ttl = injected and 3600000 or max(ceil((log[#log][1] + p[3] - now) / 1000), 0) + 1
      try(k, 'PEXPIRE', KEYS[k], format('%d', ttl))
    end
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

local out = { now, 0 }
local size = 2

-- The stored form of a state with these numbers. Units beyond any quota are all the same.
local MOST = 1099511627775

local function counts_text(p, start, counts)
  local pair, _, cycle = pairs_of(p)
  local segment, total, words = place(start, p[3], p[4]), 0, {}
  for age = p[4], 0, -1 do
    local units = min(counts[age], MOST)
    total = total + units
    -- The newest is always there: what is decided next looks for it at the end.
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

-- Tells what is known of a key before it is changed.
local function tell(k, p, answer)
  size = size + 1
  if p[1] == LOG then
    out[size] = answer and format('%.0f %.0f %.0f %.0f', answer[1], answer[2], answer[3], answer[4]) or ''
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
    -- Most requests: no tables are made for one hit.
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
        -- What asks for nothing writes nothing, unless it is denied.
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
  elseif op == REFUND or op == UNDO then
    for hit = 1, hits do
      local p, k, units, charged_at = limits[q[at]], q[at + 1], q[at + 2], q[at + 3]
      local before, before_parts
      if op == UNDO then
        before, before_parts = q[at + 4], q[at + 5]
        at = at + 2
      end
      local others = q[at + 4]
      if not terms[k] then load(k) end
      local held = terms[k]
      if held.signature ~= p.signature then before = nil end
      if held ~= REST and not failed[k] and (before or not (p[1] == METER and p[5] >= 0)) then
        -- The terms that ask, where they are not those of the state, and all others that may have counted it.
        local all = units
        -- What comes back first was owed before.
        local owed_before = before or 0
        if before and held[1] == METER then
          owed_before = before * held[2] / held[6] < 4503599627370496 and (muldiv(before, held[2], held[6])) or 0
        end
        units = still_counts(p, held, all, charged_at, owed_before)
        for other = 1, others do
          units = min(units, still_counts(limits[q[at + 4 + other]], held, all, charged_at, owed_before))
        end
        if units > 0 and held[1] == LOG then
          give_back_log(k, held, units, charged_at)
        elseif units > 0 then
          local cost, parts = units, 0
          if held[1] == METER then
            -- Longer than any bucket takes to fill is all the same.
            if units * held[6] / held[2] > 4503599627370496 then
              cost = 4503599627370496
            else
              cost, parts = muldiv(units, held[6], held[2])
            end
          end
          local edit = give_back[held[1]](k, held, cost, parts, charged_at, before, before_parts)
          if edit then write(k, held, edit, k) end
        end
      end
      at = at + 5 + others
    end
    out[verdict_at] = 1
  else
    for hit = 1, hits do
      local k = q[at + 1]
      if not terms[k] then load(k) end
      if not failed[k] then
        if try(k, 'DEL', KEYS[k]) == 1 or dirty[k] then tell_others(k) end
        values[k], terms[k], dirty[k], lists[k] = false, REST, nil, nil
      end
      at = at + 2
    end
    out[verdict_at] = 1
  end
end

for k, p in pairs(dirty) do
  if not failed[k] then
    local value = text_of(k, p, A[k], B[k])
    local ttl = format('%d', injected and 3600000 or max(ceil((ends[k] - now) / 1000), 0) + 1)
    local reply
    if values[k] or lists[k] then
      reply = try(k, 'SET', KEYS[k], value, 'PX', ttl)
    else
      -- What is there and was not read is not ours.
      reply = try(k, 'SET', KEYS[k], value, 'PX', ttl, 'NX')
    end
    if not reply then fail(k, 'holds something else') end
  end
end

local failures = {}
for k, why in pairs(failed) do
  failures[#failures + 1] = k
  failures[#failures + 1] = why
end
if #failures > 0 then out[2] = failures end
return out
