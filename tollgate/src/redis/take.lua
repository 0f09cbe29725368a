-- Decides a batch in which every request takes from buckets, fixed windows, counters and short logs, as nearly all do: what
-- `decide.lua` does, without all that this does not need. It creates no functions: creating those of the other
-- script costs Redis more than a decision.
--
-- It reads the same arguments and replies the same. Where it cannot decide (a state of other terms, a clock that has
-- stepped back, arithmetic beyond 2^53) it replies 0 and has written nothing, and `decide.lua` is called instead.

local METER, CLOCK, LOG, COUNTER = 1, 3, 5, 6
local asked = cmsgpack.unpack(ARGV[1])
local now, limits, q = asked[1], asked[2], asked[3]
local injected = now > 0
if not injected then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local keys, pack, read, sub, ceil, format = KEYS, struct.pack, struct.unpack, string.sub, math.ceil, string.format
local values = redis.call('MGET', unpack(keys))
local absent = nil
for k = 1, #keys do
  if not values[k] then
    absent = absent or {}
    absent[#absent + 1] = keys[k]
  end
end
if absent and redis.call('EXISTS', unpack(absent)) > 0 then return 0 end

local out, size, at = { now, 0 }, 2, 1
-- Of each key that changes, when its state may be forgotten. Of each hit of a request, its state if all pass.
local lasts, next_value, next_last = {}, {}, {}
while q[at] do
  local hits = q[at + 1]
  local verdict_at, all = size + 1, true
  at, size = at + 2, verdict_at
  for hit = 1, hits do
    local p, k, cost = limits[q[at]], q[at + 1], q[at + 2]
    local kind, signature, value = p[1], p[#p], values[k]
    local first, length = #signature + 1, value and #value
    local passes, new, last
    size = size + 1
    out[size] = value or ''
    if value and sub(value, 1, first - 1) ~= signature then return 0 end
    if kind == METER then
      local units, full, most, debt, parts = p[2], p[3], p[9], 0, 0
      if value then
        if length ~= first + (units > 1 and 16 or 11) then return 0 end
        local quota, moment
        if units > 1 then
          quota, moment, parts = read('>I5I7I5', value, first)
        else
          quota, moment = read('>I5I7', value, first)
        end
        if quota > most then most = quota end
        debt = moment - now
        if debt < 0 then
          debt, parts = 0, 0
        elseif debt > p[7] or (debt == p[7] and parts > p[8]) then
          return 0
        end
      end
      passes = p[5] < 0 or debt + (parts > 0 and 1 or 0) <= p[5]
      debt, parts = debt + cost, parts + q[at + 3]
      if parts >= units then debt, parts = debt + 1, parts - units end
      passes = passes and (debt < full or (debt == full and parts <= p[4]))
      if passes then
        last = now + debt
        new = signature .. (units > 1 and pack('>I5I7I5', most, last, parts) or pack('>I5I7', most, last))
        last = last + 1
      end
    elseif kind == COUNTER then
      local limit, window, segments = p[2], p[3], p[4]
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
      -- Units: of all segments, of the one that is leaving the window, and of the current one. Of the stored pairs,
      -- those that stay.
      local total, leaving, current, from, to = 0, 0, 0, 1, 0
      if value then
        local newest
        from, to = first + (segments > 1 and 12 or 7), length
        if to < from or (to + 1 - from) % width ~= 0 then return 0 end
        if segments > 1 then
          newest, total = read('>I7I5', value, first)
        else
          newest = read('>I7', value, first)
        end
        local passed = segment - newest
        if passed < 0 then return 0 end
        if passed > segments then
          total, from = 0, to + 1
        else
          if segments == 1 then
            for pos = from, to, width do
              local _, units = read(pair, value, pos)
              total = total + units
            end
          end
          while from <= to do
            local place, units = read(pair, value, from)
            local age = passed + (newest - place) % cycle
            if age < segments then break end
            if age == segments then
              leaving = units
              break
            end
            total, from = total - units, from + width
          end
          if passed == 0 then
            local _, units = read(pair, value, to - width + 1)
            current, to = units, to - width
          end
        end
      end
      local room = limit - (total - leaving) - cost
      passes = room >= 0
      if passes and leaving > 0 then
        local weighed, whole = leaving * left, (room + 1) * window
        -- Beyond 2^53 products are rounded, so that they tell only what is clearly less.
        if weighed + whole >= 9007199254740992 and math.abs(weighed - whole) < whole * 1e-9 then return 0 end
        passes = weighed < whole
      end
      if passes then
        local kept = value and sub(value, from, to) or ''
        if segments > 1 then
          new = signature .. pack('>I7I5', segment, total + cost) .. kept .. pack(pair, segment % cycle, current + cost)
        else
          new = signature .. pack('>I7', segment) .. kept .. pack(pair, segment % cycle, current + cost)
        end
        last = p.last
      end
    elseif kind == LOG then
      -- One block: see `decide.lua`. Sums are of all units up to an entry, modulo 2^40.
      local limit, window, body = p[2], p[3], first + 10
      local entries, base, newest, sum, total, of_newest = 0, 0, 0, 0, 0, 0
      local held, dropped, gone, dropped_sum = now, 0, 0, 0
      if value then
        entries = (length + 1 - body) / 12
        if entries < 1 or entries % 1 > 0 then return 0 end
        base = read('>I5', value, first + 5)
        newest, sum = read('>I7I5', value, length - 11)
        total = (sum - base) % 1099511627776
        if total == 0 then
          dropped = entries
        else
          if newest > now then
            if newest > now + window then return 0 end
            held = newest
          end
          local horizon = held - window
          if newest <= horizon then
            dropped, gone = entries, total
          elseif read('>I7', value, body) <= horizon then
            local low, high = 1, entries - 1
            while low < high do
              local middle = ceil((low + high) / 2)
              if read('>I7', value, body + 12 * middle - 12) <= horizon then low = middle else high = middle - 1 end
            end
            local _
            _, dropped_sum = read('>I7I5', value, body + 12 * low - 12)
            dropped, gone = low, (dropped_sum - base) % 1099511627776
          end
        end
        if dropped < entries then
          of_newest = sum - (entries > 1 and read('>I5', value, length - 16) or base)
        end
      end
      local units = total - gone
      local room = limit - units
      passes = cost <= room
      if passes then
        last = held + window
        if dropped == entries then
          new = signature .. '\0\0\0\0\0\0\0\0\0\0' .. pack('>I7I5', held, cost)
        else
          local to = length
          if newest == held or of_newest == 0 then
            to = length - 12
          elseif entries - dropped >= 128 then
            return 0
          end
          local entry = pack('>I7I5', held, (sum + cost) % 1099511627776)
          if dropped == 0 then
            new = (to == length and value or sub(value, 1, to)) .. entry
          else
            new = sub(value, 1, first + 4) .. pack('>I5', dropped_sum) .. sub(value, body + 12 * dropped, to) .. entry
          end
        end
        out[size] = format('1 %.0f 0 %.0f', room - cost, last - now)
      else
        if room < 0 then room = 0 end
        local reset = 0
        if units > 0 then
          local at = of_newest == 0 and read('>I7', value, length - 23) or newest
          if at + window > now then reset = at + window - now end
        end
        if cost > limit then
          out[size] = format('2 %.0f 0 %.0f', room, reset)
        else
          -- The wait ends when the entry leaves with which enough units have left.
          local need, low, high = gone + units + cost - limit, dropped + 1, entries
          while low < high do
            local middle = (low + high - (low + high) % 2) / 2
            local _, up_to = read('>I7I5', value, body + 12 * middle - 12)
            if (up_to - base) % 1099511627776 >= need then high = middle else low = middle + 1 end
          end
          local retry = read('>I7', value, body + 12 * low - 12) + window - now
          out[size] = format('0 %.0f %.0f %.0f', room, retry > 0 and retry or 0, reset)
        end
      end
    else
      local window, begun, units = p[3], now, 0
      if kind == CLOCK then begun = now - now % window end
      if value then
        if length ~= first + 11 then return 0 end
        local stored, count = read('>I7I5', value, first)
        if stored > begun then return 0 end
        if kind == CLOCK then
          if stored == begun then units = count end
        elseif count > 0 and now < stored + window then
          begun, units = stored, count
        end
      end
      units = units + cost
      passes = units <= p[2]
      if passes then new, last = signature .. pack('>I7I5', begun, units), begun + window end
    end
    if passes then next_value[hit], next_last[hit] = new, last else all = false end
    at = at + 4
  end
  out[verdict_at] = all and 1 or 0
  if all then
    local first = at - 4 * hits
    for hit = 1, hits do
      local k = q[first + 4 * hit - 3]
      values[k], lasts[k] = next_value[hit], next_last[hit]
    end
  end
end

local set, failed = redis.pcall, nil
for k, last in pairs(lasts) do
  local ttl = injected and '3600000' or format('%d', ceil((last - now) / 1000) + 1)
  local reply = set('SET', keys[k], values[k], 'PX', ttl)
  if reply.err then
    -- A replica can decide nothing, and has written nothing.
    if reply.err:find('READONLY', 1, true) then error(reply) end
    failed = failed or {}
    failed[#failed + 1] = k
    failed[#failed + 1] = reply.err
  end
end
if failed then out[2] = failed end
return out
