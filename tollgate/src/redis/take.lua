-- The small script: decides a batch in which every request only takes units from buckets, fixed windows, counters and
-- logs of one block. Nearly all batches are like that. `decide.lua` decides all others. This script creates no functions,
-- because creating the functions of `decide.lua` costs Redis more than a decision.
--
-- KEYS: the distinct keys of the batch. ARGV[1]: the time or 0, costs, limits, and four bytes for each hit: the limit
-- (plus 128 in the last hit of a request), the cost, and the key (2 bytes), as `script.rs` writes them. Numbers are
-- big-endian. Tables and decimal numbers cost Redis more than a decision, so the argument and the reply are one string
-- each.
--
-- In the compact layout, KEYS[k] is a hash, and ARGV[k + 1] is the field of the key in it, or empty for a key of its own.
-- The field with the empty name has the time until which the hash is kept, and a signature. A state that begins with it
-- is stored with one byte of 255 in its place. ADR 29 has the reasons.
--
-- If it cannot decide (the state was written under other settings, the clock has stepped back, a number exceeds 2^53),
-- it writes nothing and replies 0, and `decide.lua` is called instead.

local METER, CLOCK, LOG, COUNTER = 1, 3, 5, 6
-- A log: its units that count, those that this call adds, the time of the entry that it adds, and its header. `REPLACES`
-- is whether that entry takes the place of the newest.
local SIGNATURE, UNITS, ADDED, HELD, MOST, KEPT, HEAD, COUNT, SLOTS, BASE, OLDEST, NEWEST, SUM, BEFORE, REPLACES, LAYOUT =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
local LONGEST_RING = 256
local keys, pack, read, sub, byte, ceil = KEYS, struct.pack, struct.unpack, string.sub, string.byte, math.ceil
local char, format = string.char, string.format
local asked = ARGV[1]
local now, limit_count, cost_count, from = read('>I7I1I1', asked, 1)
local injected = now > 0
if not injected then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local costs, cost_parts, limits, log_count = {}, {}, {}, 0
for index = 1, cost_count do
  costs[index], cost_parts[index], from = read('>I7I5', asked, from)
end
-- Each limit: kind, signature, format of its state (for counters and logs: of the start of it), and numbers.
for index = 1, limit_count do
  local kind, length = byte(asked, from, from + 1)
  local signature = sub(asked, from + 2, from + 1 + length)
  from = from + 2 + length
  if kind == METER then
    local units, full, full_parts, wait, most, most_parts, ceiling, after = read('>I5I7I5I7I7I5I5', asked, from)
    local layout
    if length == 7 then
      layout = '>c7I5I7'
    else
      layout = '>c' .. length .. (units > 1 and 'I5I7I5' or 'I5I7')
    end
    limits[index] = { kind, signature, layout, units, full, full_parts, wait, most, most_parts, ceiling }
    from = after
  elseif kind == COUNTER then
    local limit, window, segments, after = read('>I5I7I2', asked, from)
    limits[index] = { kind, signature, '>c' .. length .. (segments > 1 and 'I7I5' or 'I7'), limit, window, segments }
    from = after
  else
    local limit, window, after = read('>I5I7', asked, from)
    local layout = length == 7 and '>c7' or '>c8'
    if kind == LOG then log_count = log_count + 1 end
    layout = layout .. (kind == LOG and 'I5I7I2I2I2I7I7I5I5I5' or 'I7I5')
    limits[index] = { kind, signature, layout, limit, window }
    from = after
  end
end

-- The logs by key. Only the start of a log is read, once it is needed. `others` are the keys that are read here. If only
-- some limits are logs, `is_log` has their keys.
local logs, is_log, others = nil, nil, keys
if log_count > 0 then
  logs, others = {}, {}
  if log_count < limit_count then
    is_log = {}
    for at = from, #asked - 3, 4 do
      local limit_index, _, high, low = byte(asked, at, at + 3)
      local k, takes_log = high * 256 + low, limits[limit_index % 128][1] == LOG
      if is_log[k] == nil then is_log[k] = takes_log elseif is_log[k] ~= takes_log then return 0 end
    end
    for k = 1, #keys do
      if not is_log[k] then others[#others + 1] = keys[k] end
    end
  end
end

local fields = #ARGV > 1 and ARGV or nil
local values, absent
-- By the name of a hash: the time until which it is kept, and its signature. By key: whether its field is new, and the
-- signature of its state.
local kept_until, hash_signature, is_new, signature_of
if fields then
  values, kept_until, hash_signature, is_new, signature_of = {}, {}, {}, {}, {}
  for k = 1, #keys do
    local key, field, value = keys[k], fields[k + 1], nil
    if logs and (not is_log or is_log[k]) then
      is_new[k] = false
    elseif field == '' then
      value = redis.call('MGET', key)[1]
      if not value and redis.call('EXISTS', key) > 0 then return 0 end
    else
      local found = redis.pcall('HMGET', key, '', field)
      if found.err then return 0 end
      local head = found[1]
      value = found[2]
      if head then
        if #head < 14 then return 0 end
        local signature = sub(head, 8)
        kept_until[key], hash_signature[key] = read('>I7', head), signature
        if value and byte(value) == 255 then value = signature .. sub(value, 2) end
      elseif value or redis.call('EXISTS', key) > 0 then
        return 0
      end
      is_new[k] = not value
    end
    values[k] = value
  end
elseif #others == 0 then
  values = {}
else
  values = redis.call('MGET', unpack(others))
  for k = 1, #others do
    if not values[k] then
      absent = absent or {}
      absent[#absent + 1] = others[k]
    end
  end
  if absent and redis.call('EXISTS', unpack(absent)) > 0 then return 0 end
  if #others < #keys then
    local found, next_found = values, 0
    values = {}
    for k = 1, #keys do
      if not is_log[k] then
        next_found = next_found + 1
        values[k] = found[next_found]
      end
    end
  end
end

-- The reply: the time; then for each request 1 if it is allowed or 0, followed by the length and the bytes of the state
-- that was found for each of its hits. For logs, the decision takes the place of the state.
local out, size, lengths = { pack('>I7', now) }, 1, {}
-- `lasts`: when the state of each changed key expires, or 0 if that stays the same. The others are for the hits of the
-- current request: their keys, and their new states and expiry if all hits are allowed.
local lasts, hit_keys, next_value, next_last = {}, {}, {}, {}
local last_record = #asked - 3
while from <= last_record do
  local verdict_at, all, hit, is_last = size + 1, true, 0, false
  size = verdict_at
  repeat
    local limit_index, cost_index, high, low = byte(asked, from, from + 3)
    from, hit = from + 4, hit + 1
    if limit_index > 127 then is_last, limit_index = true, limit_index - 128 end
    local p, k, cost = limits[limit_index], high * 256 + low, costs[cost_index]
    local kind, signature, value = p[1], p[2], values[k]
    local first, length = #signature + 1, value and #value or 0
    local passes, new, last
    local seen = value or ''
    if kind == METER then
      local units, full, most, debt, parts = p[4], p[5], p[10], 0, 0
      if value then
        if length ~= first + (units > 1 and 16 or 11) then return 0 end
        local found, quota, moment, stored = read(p[3], value)
        if found ~= signature then return 0 end
        if units > 1 then parts = stored end
        if quota > most then most = quota end
        debt = moment - now
        if debt < 0 then
          debt, parts = 0, 0
        elseif debt > p[8] or (debt == p[8] and parts > p[9]) then
          return 0
        end
      end
      passes = p[7] == 0 or debt + (parts > 0 and 1 or 0) < p[7]
      debt, parts = debt + cost, parts + cost_parts[cost_index]
      if parts >= units then debt, parts = debt + 1, parts - units end
      passes = passes and (debt < full or (debt == full and parts <= p[6]))
      if passes then
        last = now + debt
        if units > 1 then new = pack(p[3], signature, most, last, parts) else new = pack(p[3], signature, most, last) end
        last = last + 1
      end
    elseif kind == COUNTER then
      local limit, window, segments = p[4], p[5], p[6]
      local segment, left = p.segment, p.left
      if not segment then
        local rest = now % window
        local ticks = rest * segments
        if ticks >= 9007199254740992 then return 0 end
        local elapsed = ticks % window
        segment, left = (now - rest) / window * segments + (ticks - elapsed) / window, window - elapsed
        p.segment, p.left = segment, left
        -- The first microsecond in which this segment no longer counts.
        local within, part = (segment + 1) % segments, window % segments
        p.last = (segment + 1 - within) / segments * window + window
          + within * ((window - part) / segments) + ceil(within * part / segments)
        p.pair, p.width, p.cycle = '>I1I5', 6, 256
        if segments >= 255 then p.pair, p.width, p.cycle = '>I2I5', 7, 65536 end
      end
      local pair, width, cycle = p.pair, p.width, p.cycle
      -- Units of all segments, of the segment that is leaving the window, and of the current segment; then the range
      -- of stored pairs to keep.
      local total, leaving, current, kept_from, kept_to, is_current = 0, 0, 0, 1, 0, false
      if value then
        local found, newest, units_of_all
        kept_from, kept_to = first + (segments > 1 and 12 or 7), length
        if kept_to < kept_from or (kept_to + 1 - kept_from) % width ~= 0 then return 0 end
        found, newest, units_of_all = read(p[3], value)
        if found ~= signature then return 0 end
        if segments > 1 then total = units_of_all end
        local passed = segment - newest
        if passed < 0 then return 0 end
        is_current = passed == 0
        if passed > segments then
          total, kept_from = 0, kept_to + 1
        else
          if segments == 1 then
            for pos = kept_from, kept_to, width do
              local _, units = read(pair, value, pos)
              total = total + units
            end
          end
          while kept_from <= kept_to do
            local place, units = read(pair, value, kept_from)
            local age = passed + (newest - place) % cycle
            if age < segments then break end
            if age == segments then
              leaving = units
              break
            end
            total, kept_from = total - units, kept_from + width
          end
          if passed == 0 then
            local _, units = read(pair, value, kept_to - width + 1)
            current, kept_to = units, kept_to - width
          end
        end
      end
      local room = limit - (total - leaving) - cost
      passes = room >= 0
      if passes and leaving > 0 then
        local weighed, whole = leaving * left, (room + 1) * window
        -- Products beyond 2^53 are rounded, so only a clear difference decides.
        if weighed + whole >= 9007199254740992 and math.abs(weighed - whole) < whole * 1e-9 then return 0 end
        passes = weighed < whole
      end
      if passes then
        local kept = kept_from <= kept_to and sub(value, kept_from, kept_to) or ''
        if segments > 1 then
          new = pack(p[3], signature, segment, total + cost) .. kept .. pack(pair, segment % cycle, current + cost)
        else
          new = pack(p[3], signature, segment) .. kept .. pack(pair, segment % cycle, current + cost)
        end
        last = is_current and 0 or p.last
      end
    elseif kind == LOG then
      -- A log in a ring: see `decide.lua`. All requests of a call have the same time, so a call adds at most one entry, at
      -- the time `held`.
      local limit, window, log, at_slots = p[4], p[5], logs[k], first + 46
      if not log then
        local text = redis.pcall('GETRANGE', keys[k], '0', '54')
        if type(text) ~= 'string' then return 0 end
        local units, held, found, most, kept, head, count, slots, base, oldest, newest, sum, before, replaces = 0, now
        -- An empty string is not a log.
        if text == '' and redis.call('EXISTS', keys[k]) > 0 then return 0 end
        if text ~= '' then
          if #text < at_slots then return 0 end
          found, most, kept, head, count, slots, oldest, newest, sum, before, base = read(p[3], text)
          if found ~= signature or count == 0 or count > slots or head >= slots then return 0 end
          if newest > now then held = newest end
          local horizon = held - window
          if sum == base or newest <= horizon then
            count, held = 0, now
          else
            if newest > now + window then return 0 end
            if oldest <= horizon then
              -- Find the newest entry that has left the window, `low`: most often one of the first. `high` is still in it.
              local low, high, near = 0, count - 1, count - 1
              if near > 4 then near = 4 end
              if head + near >= slots then near = slots - head - 1 end
              local at = at_slots + 12 * head
              text = redis.call('GETRANGE', keys[k], format('%d', at), format('%d', at + 12 * near + 11))
              if #text < 12 * near + 12 then return 0 end
              oldest, base = newest, read('>I5', text, 8)
              for entry = 1, near do
                local moment, up_to = read('>I7I5', text, 12 * entry + 1)
                if moment > horizon then
                  high, oldest = entry, moment
                  break
                end
                low, base = entry, up_to
              end
              while low + 1 < high do
                local middle = ceil((low + high) / 2)
                at = at_slots + 12 * ((head + middle) % slots)
                text = redis.call('GETRANGE', keys[k], format('%d', at), format('%d', at + 11))
                if #text < 12 then return 0 end
                local moment, up_to = read('>I7I5', text, 1)
                if moment > horizon then high, oldest = middle, moment else low, base = middle, up_to end
              end
              head, count = (head + high) % slots, count - high
            end
            units, replaces = (sum - base) % 1099511627776, newest == held or sum == before
            -- The units of the entries that are left were given back: the next entry begins a log at its own time.
            if units == 0 then count = 0 end
          end
        end
        if not count or count == 0 then
          head, count, base, oldest, newest, sum, before, replaces = 0, 0, 0, held, held, 0, 0, false
        end
        -- Debts leave as many units in a log as its largest quota needs.
        if not most or most < limit then most = limit end
        log = {
          signature, units, 0, held, most, kept, head, count, slots, base, oldest, newest, sum, before, replaces, p[3],
        }
        logs[k] = log
      end
      if log[SIGNATURE] ~= signature then return 0 end
      local units, held, count = log[UNITS], log[HELD], log[COUNT]
      local room = limit - units
      passes = cost <= room
      if passes then
        if count >= LONGEST_RING and not log[REPLACES] then return 0 end
        new, last = cost, held + window
        seen = pack('>I1I5I7I7', 1, room - cost, 0, last - now)
      else
        if room < 0 then room = 0 end
        local head, slots, reset, retry = log[HEAD], log[SLOTS], 0, held
        if units > 0 then
          local moment = held
          if log[ADDED] == 0 then
            moment = log[NEWEST]
            if log[SUM] == log[BEFORE] then
              -- The newest entry has no units left, but the entry before it has.
              local at = at_slots + 12 * ((head + count - 2) % slots)
              local text = redis.call('GETRANGE', keys[k], format('%d', at), format('%d', at + 6))
              if #text < 7 then return 0 end
              moment = read('>I7', text, 1)
            end
          end
          if moment + window > now then reset = moment + window - now end
        end
        if cost > limit then
          seen = pack('>I1I5I7I7', 2, room, 0, reset)
        else
          -- The wait ends with the first entry whose expiry frees enough units.
          local need = units + cost - limit
          if need <= units - log[ADDED] then
            if need == 1 then
              retry = log[OLDEST]
            else
              local low, high, base = 0, count - 1, log[BASE]
              retry = log[NEWEST]
              while low < high do
                local middle = (low + high - (low + high) % 2) / 2
                local at = at_slots + 12 * ((head + middle) % slots)
                local text = redis.call('GETRANGE', keys[k], format('%d', at), format('%d', at + 11))
                if #text < 12 then return 0 end
                local moment, up_to = read('>I7I5', text, 1)
                if (up_to - base) % 1099511627776 >= need then high, retry = middle, moment else low = middle + 1 end
              end
            end
          end
          retry = retry + window - now
          seen = pack('>I1I5I7I7', 0, room, retry > 0 and retry or 0, reset)
        end
      end
    else
      local window, begun, units, is_current = p[5], now, 0, false
      if kind == CLOCK then begun = now - now % window end
      if value then
        if length ~= first + 11 then return 0 end
        local found, stored, count = read(p[3], value)
        if found ~= signature or stored > begun then return 0 end
        if kind == CLOCK then
          if stored == begun then units, is_current = count, true end
        elseif count > 0 and now < stored + window then
          begun, units, is_current = stored, count, true
        end
      end
      units = units + cost
      passes = units <= p[4]
      if passes then new, last = pack(p[3], signature, begun, units), is_current and 0 or begun + window end
    end
    if passes then hit_keys[hit], next_value[hit], next_last[hit] = k, new, last else all = false end
    if fields then signature_of[k] = signature end
    length = #seen
    local prefix = lengths[length]
    if not prefix then
      prefix = char((length - length % 65536) / 65536, (length - length % 256) / 256 % 256, length % 256)
      lengths[length] = prefix
    end
    out[size + 1], out[size + 2] = prefix, seen
    size = size + 2
  until is_last
  out[verdict_at] = all and '\1' or '\0'
  if all then
    for index = 1, hit do
      local k, new, last = hit_keys[index], next_value[index], next_last[index]
      local log = logs and logs[k]
      if log then log[UNITS], log[ADDED] = log[UNITS] + new, log[ADDED] + new else values[k] = new end
      -- A state in the same window or segment keeps its expiry.
      if last > 0 then lasts[k] = last elseif not lasts[k] then lasts[k] = 0 end
    end
  end
end

local set, failed, shown, expires = redis.pcall, nil, 0, ''
for k, last in pairs(lasts) do
  local reply
  if logs and logs[k] then
    -- The entry is written before the header that makes it part of the log.
    local log, key, body = logs[k], keys[k], nil
    local signature, head, slots, kept, older = log[SIGNATURE], log[HEAD], log[SLOTS], log[KEPT], log[COUNT]
    local sum, before = (log[SUM] + log[ADDED]) % 1099511627776, log[SUM]
    if log[REPLACES] then before, older = log[BEFORE], older - 1 end
    local at_slots, entry = #signature + 47, pack('>I7I5', log[HELD], sum)
    local resizes = not slots or older >= slots or (slots > 16 and 4 * older + 4 < slots)
    -- For longer than the entry counts, so that few requests change the expiry.
    local renews = resizes or last > kept
    if renews then kept = last + ceil((last - now) / 8) end
    if resizes then
      body = ''
      if older > 0 then
        body = set('GETRANGE', key, format('%d', at_slots), format('%d', at_slots + 12 * slots - 1))
        if type(body) == 'table' then
          reply = body
        else
          local to = head + older
          body = sub(body, 12 * head + 1, 12 * to) .. (to > slots and sub(body, 1, 12 * (to - slots)) or '')
        end
      end
      -- A quarter more than it has, and one for a log that is new.
      slots, head = slots and older + 3 + (older - older % 4) / 4 or 1, 0
    end
    local header = pack(log[LAYOUT], signature, log[MOST], kept, head, older + 1, slots, log[OLDEST], log[HELD], sum, before,
      log[BASE])
    if resizes and not reply then
      local unit, time = 'PXAT', nil
      if injected then unit, time = 'PX', '3600000' else time = format('%d', ceil(kept / 1000) + 1) end
      local text = header .. body .. entry .. string.rep('\0\0\0\0\0\0\0\0\0\0\0\0', slots - older - 1)
      if log[SLOTS] then
        reply = set('SET', key, text, unit, time)
      else
        reply = set('SET', key, text, unit, time, 'NX')
        -- The key exists, and is empty: not a log.
        if not reply then reply = { err = 'holds something else' } end
      end
    elseif not reply then
      reply = set('SETRANGE', key, format('%d', at_slots + 12 * ((head + older) % slots)), entry)
      -- The expiry before the header that has it: later requests rely on it.
      if type(reply) == 'number' and renews then
        reply = set('PEXPIRE', key, injected and '3600000' or format('%d', ceil((kept - now) / 1000) + 1))
      end
      if type(reply) == 'number' then reply = set('SETRANGE', key, '0', header) end
      if type(reply) == 'number' then reply = nil end
    end
  elseif fields and fields[k + 1] ~= '' then
    local key, text = keys[k], values[k]
    local signature, sweeps = hash_signature[key], is_new[k]
    if not signature then
      signature, kept_until[key] = signature_of[k], 0
      hash_signature[key] = signature
    end
    local length = #signature
    if sub(text, 1, length) == signature then text = '\255' .. sub(text, length + 1) end
    if last > kept_until[key] then
      -- For longer than this state lasts, so that few requests change the expiry of the hash.
      sweeps, last = true, last + math.max(last - now, 10000000)
      kept_until[key] = last
      reply = set('HSET', key, '', pack('>I7', last) .. signature, fields[k + 1], text)
      if type(reply) == 'number' then
        reply = set('PEXPIRE', key, injected and '3600000' or format('%d', ceil((last - now) / 1000) + 1))
      end
    else
      reply = set('HSET', key, fields[k + 1], text)
    end
    if sweeps and type(reply) == 'number' then
      -- Removes expired states from a few fields at random: more than one request can add. If the hash has the
      -- signature of earlier settings, looks at all fields, and replaces the signature once no state uses it.
      local is_other = last == kept_until[key] and signature_of[k] ~= signature
      local found, dead, uses = set('HRANDFIELD', key, is_other and '128' or '4', 'WITHVALUES'), nil, 0
      if found.err then reply = found end
      for index = 1, #found, 2 do
        local text, field = found[index + 1], found[index]
        local is_short = byte(text) == 255
        if is_short then text = signature .. sub(text, 2) end
--@expiry
        -- A clock that tests set may step back.
        if injected then over = over + 86400000000 end
        if field ~= '' and over < now then
          dead = dead or {}
          dead[#dead + 1] = field
        elseif is_short then
          uses = uses + 1
        end
      end
      if dead then
        local removed = set('HDEL', key, unpack(dead))
        if type(removed) == 'table' then reply = removed end
      end
      if is_other and uses == 0 and #found < 256 and type(reply) == 'number' then
        hash_signature[key] = signature_of[k]
        reply = set('HSET', key, '', pack('>I7', last) .. signature_of[k])
      end
    end
    if type(reply) == 'number' then reply = nil end
  elseif last == 0 then
    reply = set('SET', keys[k], values[k], 'KEEPTTL')
  elseif injected then
    reply = set('SET', keys[k], values[k], 'PX', '3600000')
  else
    if last ~= shown then shown, expires = last, format('%d', ceil(last / 1000) + 1) end
    reply = set('SET', keys[k], values[k], 'PXAT', expires)
  end
  if reply and reply.err then
    -- A replica cannot decide, and has written nothing.
    if reply.err:find('READONLY', 1, true) then error(reply) end
    failed = failed or {}
    failed[#failed + 1] = k
    failed[#failed + 1] = reply.err
  end
end
local seen = table.concat(out)
if failed then return { seen, failed } end
return seen
