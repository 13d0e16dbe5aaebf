-- clock: the server's time, in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
