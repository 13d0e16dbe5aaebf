-- renew, plainly: nothing lapses, nothing is shown, and nothing is known of the leases but that
-- they live. All beats are looked at before any is renewed; what is not plain goes into `others`.
local answers, others = {}, {}
do
  local beats, gids = ARGV[1], {}
  for n = 1, #beats / 28 do gids[n] = sub(beats, 28 * n - 27, 28 * n - 20) end
  local heads = gids[1] and call('HMGET', HELD, unpack(gids)) or {}
  local ends, changed, at = {}, {}, 1
  local last, times, shown, start, renewed
  for n = 1, #gids do
    local gid, raw = gids[n], heads[n]
    local nonce, first, leases = read('<c16I2I2', beats, 28 * n - 19)
    local is_plain = raw
    if raw then
      local deadline, renewals, of, granted_at, term, lifetime, count, live, noted =
        read('<I8I4c16I8xxxxxxxxxxxxI8I8I2I2I1', raw)
      local ended = live < count and string.find(sub(raw, -count), '1', first + 1, true)
      is_plain = of == nonce and deadline > now and noted == 0 and first + leases <= count
        and not (ended and ended <= first + leases)
      if is_plain then
        local till = math.min(now + term, granted_at + lifetime)
        -- Beats are much alike: what one of them says is made once.
        if till ~= last or renewals ~= times then
          last, times, shown = till, renewals, string.format('%.0f', till)
          start, renewed = pack('<I8I4', till, renewals + 1), pack('<I1I8I4', 1, till - now, 0)
        end
        ends[at], ends[at + 1], changed[at] = shown, gid, gid
        changed[at + 1] = start .. sub(raw, 13)
        at = at + 2
        answers[n] = renewed
      end
    end
    if not is_plain then
      others[#others + 1] = { nth = n, gid = gid, nonce = nonce, runs = { { first, leases } }, lapse = {}, progress = {} }
    end
  end
  if at > 1 then
    call('ZADD', ENDS, unpack(ends))
    call('HSET', HELD, unpack(changed))
  end
  if #others == 0 and ARGV[2] == '' then return pack('<I1I8I1', 0, now, 0) .. concat(answers) end
end
