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
local asked = cmsgpack.unpack(ARGV[1])
local now, limits, q = asked[1], asked[2], asked[3]
local injected = now > 0
if not injected then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local values = call('MGET', unpack(KEYS))

local METER, INTERVAL, CLOCK, OPENED, LOG, COUNTER, STRIKES = 1, 2, 3, 4, 5, 6, 7
local TAKE, LOOK, REFUND, RESET, SLICE = 0, 1, 2, 3, 4

-- The first two numbers of each key's state, the counts of a counter, and when it may be forgotten.
local A, B, C, ends, dirty = {}, {}, {}, {}, {}
local failed = {}

local function fail(k, why)
  if not failed[k] then
    failed[k] = why
  end
end

local function is_count(n)
  return n and n >= 0 and n < 9007199254740992 and n % 1 == 0
end

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

-- What is no string reads as absent.
local function check_absent(k)
  if try(k, 'EXISTS', KEYS[k]) == 1 then fail(k, 'holds something else') end
end

local function load_pair(k)
  local value = values[k]
  if not value then check_absent(k) end
  local a, b = 0, 0
  if value then
    a, b = tonumber(value), 0
    if not a then
      local first, second = value:match('^(%d+) (%d+)$')
      a, b = tonumber(first), tonumber(second)
    end
    if not is_count(a) or not is_count(b) then
      fail(k, 'holds something else')
      a, b = 0, 0
    end
  end
  A[k], B[k] = a, b
end

-- The most that any limit counts to.
local MOST = 4294967296

-- Counts for so many segments. Of a limit that had more, the oldest are one.
local function fit_counts(counts, segments)
  local fitted = { segments = segments }
  for age = 0, segments do
    fitted[age] = min(counts[age] or 0, MOST)
  end
  for age = segments + 1, counts.segments do
    fitted[segments] = min(fitted[segments] + counts[age], MOST)
  end
  return fitted
end

local function load_counter(k, segments)
  local counts, seen = {}, -1
  local value = values[k]
  if not value then check_absent(k) end
  A[k] = 0
  if value then
    for word in value:gmatch('%d+') do
      local n = tonumber(word)
      if seen < 0 then A[k] = n else counts[seen] = n end
      seen = seen + 1
    end
    if seen < 1 or not is_count(A[k]) or value:find('[^%d ]') then
      fail(k, 'holds something else')
      A[k] = 0
    end
  end
  counts.segments = seen - 1
  C[k] = fit_counts(counts, segments)
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
local function start_of(segment, window, segments)
  local within = segment % segments
  local rest = window % segments
  return (segment - within) / segments * window + within * ((window - rest) / segments) + ceil(within * rest / segments)
end

-- Each judges a cost: whether it passes, and the state to write, if any.
local judge, give_back = {}, {}

-- A state may be from before the limit was changed, or of a variant of it: whatever it says is cut to what the limit
-- can mean. Windows and periods are told by when they begin, and are those of the limit in which that moment lies, so
-- that a changed window neither locks a key out nor finds more than it holds.

local function meter_now(k, p)
  local a, b = A[k], B[k]
  if b >= p[2] then a, b = a + 1, 0 end
  if a < now then return now, 0, false end
  local debt = a - now
  if debt > p[3] or (debt == p[3] and b > p[4]) then return now + p[3], p[4], true end
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

give_back[METER] = function(k, p, cost, parts, at)
  if p[5] >= 0 or now < at then return end
  local a, b = meter_now(k, p)
  local debt = a - now
  local owed = cost - (now - at)
  if owed < 0 then return end
  if owed > debt or (owed == debt and parts > b) then owed, parts = debt, b end
  if owed == 0 and parts == 0 then return end
  local micros, rest = debt - owed, b - parts
  if rest < 0 then micros, rest = micros - 1, rest + p[2] end
  return { now + micros, rest, now + micros + 1 }
end

local function interval_now(k, p)
  local current = now - now % p[4]
  local period, tokens = A[k] - A[k] % p[4], min(B[k], p[2])
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

give_back[INTERVAL] = function(k, p, cost, _, at)
  if now < at then return end
  local period, tokens = interval_now(k, p)
  local came_back = p[3] * max((period - (at - at % p[4])) / p[4], 0)
  local owed = min(max(cost - came_back, 0), tokens)
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
  if values[k] then
    fail(k, 'holds something else')
    return 0, 0, 0
  end
  local tail = try(k, 'LRANGE', KEYS[k], -2, -1)
  if not tail or #tail == 0 then return 0, 0, 0 end
  local total = tail[2] and tonumber(tail[2]:match('^=(%d+)$'))
  local newest, last_units = read_entry(tail[1])
  if not total or not newest then
    fail(k, 'holds something else')
    return 0, 0, 0
  end
  if total == 0 then return 0, 0, 0, true end
  return total, newest, last_units, true
end

-- Whether it passes, what to write, and the answer: outcome (1 passes, 0 waits, 2 never), remaining, retry, reset.
judge[LOG] = function(k, p, cost)
  local limit, window, counts_denied = p[2], p[3], p[4] == 1
  local total, newest, last_units, exists = log_now(k)
  if newest > now + window then
    local units = min(total, limit)
    local remaining = limit - units
    local counts = cost <= remaining or (counts_denied and cost <= limit)
    local edit = { collapse = true, add = counts and cost or 0, total = total, limit = limit, ends = now + window }
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
    last_units = last_units, limit = limit, ends = held + window,
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
      if left >= limit then
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

local function write_log(k, edit)
  local key = KEYS[k]
  local ttl = format('%d', injected and 3600000 or ceil((edit.ends - now) / 1000) + 1)
  if edit.collapse then
    local total = min(edit.total + edit.add, edit.limit)
    if not try(k, 'DEL', key) then return end
    if not try(k, 'RPUSH', key, entry_text(now, total), format('=%.0f', total)) then return end
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
    local units = min(edit.last_units + edit.add, edit.limit)
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
    try(k, 'LSET', key, -1, format('=%.0f', total))
    try(k, 'PEXPIRE', key, ttl)
  end
end

local function give_back_log(k, cost, charged_at)
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
    try(k, 'LSET', KEYS[k], -1, format('=%.0f', total - given))
  end
end

-- Other processes may remember that this key is denied.
local function tell_others(k)
  pcall_redis('PUBLISH', 'rate_limit:changed', KEYS[k])
end

local function prepare(k, p)
  if p[1] == COUNTER then
    if not C[k] then
      load_counter(k, p[4])
    elseif C[k].segments ~= p[4] then
      C[k] = fit_counts(C[k], p[4])
    end
  elseif p[1] ~= LOG and not A[k] then
    load_pair(k)
  end
end

local function write(k, p, edit)
  if p[1] == LOG then
    write_log(k, edit)
  else
    if p[1] == COUNTER then A[k], C[k] = edit[1], edit[2] else A[k], B[k] = edit[1], edit[2] end
    ends[k], dirty[k] = edit[3], p
  end
end

local out = { now, 0 }
local size = 2

-- Tells what is known of a key before it is changed.
local function tell(k, p, answer)
  size = size + 1
  if p[1] == LOG then
    out[size] = answer and format('%.0f %.0f %.0f %.0f', answer[1], answer[2], answer[3], answer[4]) or ''
  elseif p[1] == COUNTER then
    out[size] = format('%.0f ', A[k]) .. table.concat(C[k], ' ', 0, p[4])
  else
    out[size] = A[k]
    size = size + 1
    out[size] = B[k]
  end
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
    prepare(k, p)
    local pass, edit, answer = judge[p[1]](k, p, q[at + 2], q[at + 3])
    tell(k, p, answer)
    if edit and not failed[k] then write(k, p, edit) end
    out[verdict_at] = pass and 1 or 0
    at = at + 4
  elseif op == TAKE or op == LOOK then
    local all, edits, passes = true, {}, {}
    for hit = 1, hits do
      local p, k = limits[q[at]], q[at + 1]
      prepare(k, p)
      local pass, edit, answer = judge[p[1]](k, p, q[at + 2], q[at + 3])
      tell(k, p, answer)
      edits[hit], passes[hit] = edit or false, pass
      if not pass or failed[k] then all = false end
      at = at + 4
    end
    if op == TAKE then
      for hit = 1, hits do
        local first = at - 4 * (hits - hit + 1)
        local p, k = limits[q[first]], q[first + 1]
        -- What asks for nothing writes nothing, unless it is denied.
        local takes = all and q[first + 2] + q[first + 3] > 0
        if edits[hit] and (takes or not passes[hit]) and not failed[k] then write(k, p, edits[hit]) end
      end
    end
    out[verdict_at] = all and 1 or 0
  elseif op == SLICE then
    -- One hit with several costs to try, the largest first.
    local p, k, taken = limits[q[at]], q[at + 1], 0
    prepare(k, p)
    local answer
    for choice = 1, hits do
      local pass, edit
      pass, edit, answer = judge[p[1]](k, p, q[at + 2 * choice], q[at + 2 * choice + 1])
      if (pass and not failed[k]) or choice == hits then
        tell(k, p, answer)
        if pass and not failed[k] then taken = choice end
        if edit and not failed[k] then write(k, p, edit) end
        break
      end
    end
    out[verdict_at] = taken
    at = at + 2 + 2 * hits
  elseif op == REFUND then
    for hit = 1, hits do
      local p, k = limits[q[at]], q[at + 1]
      prepare(k, p)
      if not failed[k] then
        if p[1] == LOG then
          give_back_log(k, q[at + 2], q[at + 4])
          tell_others(k)
        else
          local edit = give_back[p[1]](k, p, q[at + 2], q[at + 3], q[at + 4])
          if edit then
            write(k, p, edit)
            tell_others(k)
          end
        end
      end
      at = at + 5
    end
    out[verdict_at] = 1
  else
    for hit = 1, hits do
      local p, k = limits[q[at]], q[at + 1]
      prepare(k, p)
      if p[1] == LOG then log_now(k) end
      if not failed[k] then
        if try(k, 'DEL', KEYS[k]) == 1 or dirty[k] then tell_others(k) end
        values[k], A[k], B[k], dirty[k] = false, 0, 0, nil
        if p[1] == COUNTER then load_counter(k, p[4]) end
      end
      at = at + 2
    end
    out[verdict_at] = 1
  end
end

for k, p in pairs(dirty) do
  if not failed[k] then
    local value
    if p[1] == COUNTER then
      value = format('%.0f ', A[k]) .. table.concat(C[k], ' ', 0, C[k].segments)
    elseif B[k] == 0 then
      value = format('%d', A[k])
    else
      value = format('%d %d', A[k], B[k])
    end
    local ttl = format('%d', injected and 3600000 or max(ceil((ends[k] - now) / 1000), 0) + 1)
    local reply
    if values[k] then
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
