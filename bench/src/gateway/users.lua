-- For wrk: users send requests in turn, and the figures are printed on one line.

local requests, turn = {}, 0

function init(args)
  for user = 1, tonumber(args[1]) do
    requests[user] = wrk.format("GET", nil, { ["x-user-id"] = "user-" .. user })
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout
  print(string.format("LOAD %d %d %.1f %.1f %d %d", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), errors.status, failed))
end
