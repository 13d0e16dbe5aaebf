-- clock: the time that a test's hand shows, in microseconds; the last argument.
local now = tonumber(ARGV[#ARGV])
