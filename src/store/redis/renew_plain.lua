-- renew, plainly: nothing lapses, nothing is shown, nothing is known of the leases but that they live,
-- and the maximum lifetime is far. If the beats are those of a whole round, of one lease each, it is renewed by
-- what they share; if each is of one lease that is as it was given, they are one from now on. Otherwise all
-- beats are looked at before any is renewed; what is not plain goes into `others`.
local answers, others = {}, {}
do
  local roll, runs, names, cells = ARGV[1], ARGV[2], {}, {}
  local beats, first, leases = #roll / NAME, 0, 0
  -- Deadline, renewals, from when on one may be cut, term, whether all are singles.
  local SHARE = '<I8I4I8I8I1'
  local function answer(granted) return pack('<I1I8I4', 1, granted, 0) end
  local function all_alike(granted) return pack('<I1I8I1I1I8', 0, now, 0, 2, granted) end
  local are_singles = beats > 1 and ARGV[3] == '' and runs == ''
  if are_singles then
    local raw = call('HGET', HELD, sub(roll, 1, NAME))
    local round = raw and sub(raw, 13, KIND - 1)
    local kept = round and round ~= ALONE and call('HMGET', HELD, round, round .. SHARED)
    if kept and kept[1] == roll then
      local till, times, capped, term, singles = read(SHARE, kept[2])
      if singles == 1 and till > now and now < capped then
        till = now + term
        call('HSET', HELD, round .. SHARED, pack(SHARE, till, times + 1, capped, term, 1))
        call('ZADD', ENDS, till, round)
        return all_alike(term)
      end
    end
  end
  if beats > 0 then
    names = { read(rep('c24', beats), roll) }
    names[beats + 1] = nil
    cells = call('HMGET', HELD, unpack(names))
    if runs == '' then first, leases = 0, 1 else first, leases = read('<I2I2', runs) end
  end
  -- Where nothing is overdue, none of them is.
  if are_singles and cells[1] and read('<I8', cells[1]) == 0
    and (tonumber(call('ZRANGE', ENDS, '0', '0', 'WITHSCORES')[2]) or 0) > now then
    local capped, term = read('<I8I8', cells[1], KIND)
    local till, round = now + term, sub(roll, 1, 8) .. pack('<I4', 1)
    local changed, same, cell = {}, nil, nil
    for n = 1, beats do
      if cells[n] ~= same then
        same = cells[n]
        local own_capped, own_term = read('<I8I8', same or cells[1], KIND)
        if not same or read('<I8', same) > 0 or own_term ~= term or own_capped <= now then
          changed = nil
          break
        end
        capped, cell = math.min(capped, own_capped), pack('<I8I4', till, 1) .. round .. sub(same, KIND)
      end
      changed[2 * n - 1], changed[2 * n] = names[n], cell
    end
    if changed then
      call('ZREM', ENDS, unpack(names))
      changed[2 * beats + 1], changed[2 * beats + 2] = round, roll
      changed[2 * beats + 3], changed[2 * beats + 4] = round .. SHARED, pack(SHARE, till, 0, capped, term, 1)
      call('HSET', HELD, unpack(changed))
      call('ZADD', ENDS, till, round)
      return all_alike(term)
    end
  end
  -- Beats are much alike: what a cell comes to, or what is behind its deadline, is found out once.
  local alike, known, rests, rounds = runs == rep(sub(runs, 1, 4), beats), {}, {}, {}
  local unsaid, left, freed = {}, {}, {}
  for n = 1, beats do
    local raw, name = cells[n], names[n]
    local to = raw and known[raw]
    if to == nil then
      local rest = sub(raw, 9)
      to = rests[rest]
      if to == nil then
        local renewals, round, capped, term, count, live, noted = read('<I4c12I8I8I2I2I1', rest)
        local till, times = now + 1, 0
        if round ~= ALONE then till, times = read(SHARE, call('HGET', HELD, round .. SHARED)) end
        to = noted == 0 and now < capped and till > now and {
          renewals = renewals + times + 1, round = round, kind = sub(raw, KIND), capped = capped, term = term,
          count = count, live = live,
        }
        rests[rest] = to
      end
      local till = read('<I8', raw)
      if to and to.round == ALONE and till > 0 and till <= now then to = false end
      known[raw], unsaid[raw] = to, till == 0
    end
    if to and unsaid[raw] and deadline_of(raw, call('HGET', HELD, sub(name, 1, 8))) <= now then to = false end
    if not alike then first, leases = read('<I2I2', runs, 4 * n - 3) end
    local is_plain = to and first + leases <= to.count
    if is_plain and to.live < to.count then
      local ended = string.find(sub(call('HGET', HELD, sub(name, 1, 8)), -to.count), '1', first + 1, true)
      is_plain = not (ended and ended <= first + leases)
    end
    if is_plain then
      local round = rounds[to.term]
      if not round then
        round = {
          name = beats > 1 and sub(name, 1, 8) .. pack('<I4', to.renewals) or ALONE,
          till = now + to.term, capped = to.capped, singles = 1, changed = {}, at = 1, answer = answer(to.term),
        }
        rounds[to.term] = round
      end
      local cell, at = to.cell, round.at
      if not cell then
        cell = pack('<I8I4', round.till, to.renewals) .. round.name .. to.kind
        to.cell, round.capped = cell, math.min(round.capped, to.capped)
        if to.count > 1 then round.singles = 0 end
      end
      round.changed[at], round.changed[at + 1], round.at = name, cell, at + 2
      if to.round == ALONE then freed[#freed + 1] = name else left[#left + 1], left[#left + 2] = to.round, name end
      answers[n] = round.answer
    else
      others[#others + 1] = {
        nth = n, gid = sub(name, 1, 8), nonce = sub(name, 9), runs = { { first, leases } }, lapse = {}, progress = {},
      }
    end
  end
  leave(left)
  if beats > 1 and freed[1] then call('ZREM', ENDS, unpack(freed)) end
  for term, round in pairs(rounds) do
    call('HSET', HELD, unpack(round.changed))
    if round.name == ALONE then
      call('ZADD', ENDS, round.till, names[1])
    else
      local came = (round.at - 1) / 2
      if came < beats then
        roll = {}
        for n = 1, came do roll[n] = round.changed[2 * n - 1] end
        roll = concat(roll)
      end
      call('HSET', HELD, round.name, roll,
        round.name .. SHARED, pack(SHARE, round.till, 0, round.capped, term, round.singles))
      call('ZADD', ENDS, round.till, round.name)
    end
  end
  if #others == 0 and ARGV[3] == '' then return pack('<I1I8I1', 0, now, 0) .. concat(answers) end
end
