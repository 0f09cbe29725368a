      -- Sets `over` to a time after which the state in `text` no longer matters, from its signature and numbers.
      local code = byte(text) or 0
      local kind, is_long, over = code % 16, code % 32 >= 16, 0
      if kind == 1 or kind == 8 then
        local from = (code >= 32 and 13 or 8) + (is_long and 6 or 5)
        if #text >= from + 6 then over = read('>I7', text, from) + 1 end
      elseif (kind == 3 or kind == 4) and #text >= 19 then
        local span, since = read(is_long and '>I7I7' or '>I6I7', text, 2)
        over = since + span
      elseif kind == 6 and #text >= 17 then
        local span, segments, newest = read(is_long and '>I7I2I7' or '>I6I2I7', text, 2)
        over = (newest + segments + 2) * span / segments
      elseif kind == 2 and #text == 29 then
        local portion, period, since, units = read('>I7I7I7I7', text, 2)
        over = since + (units / portion + 2) * period
      elseif kind == 7 and #text == 29 then
        local within, lasts, since = read('>I7I7I7', text, 2)
        over = since + within + lasts
      end
