-- A common token bucket script: two string keys, floating-point seconds and tokens, and both keys written on every
-- request, even if it is denied.
local bucket, capacity, rate = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local requested, ttl = tonumber(ARGV[3]), tonumber(ARGV[4])
local tokens_key, timestamp_key = bucket .. ':tokens', bucket .. ':timestamp'

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local tokens = tonumber(redis.call('GET', tokens_key))
local refilled_at = tonumber(redis.call('GET', timestamp_key))
if tokens == nil then tokens = capacity end
if refilled_at == nil then refilled_at = now end

tokens = math.min(capacity, tokens + math.max(0, now - refilled_at) * rate)
local allowed = tokens >= requested
if allowed then tokens = tokens - requested end

redis.call('SETEX', tokens_key, ttl, tostring(tokens))
redis.call('SETEX', timestamp_key, ttl, tostring(now))
return { allowed and 1 or 0, tostring(tokens), capacity }
