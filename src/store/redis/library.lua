-- library: how a verb becomes a function of the library. Without a flag it takes more memory, and
-- is refused on a full server; what a holder or an operator needs to get out runs there, too.
local function begin(keys, args)
  if not call then learn() end
  KEYS, ARGS, K, SESSION = keys, args, names_of(keys[1]), keys[2]
  empty(M)
  empty(changed)
  empty(sums)
  created, there, ready, suspicious = false, true, 0, 0
  if next(grants) then grants = {} end
  if next(unsaved) then unsaved = {} end
  now = clock(args)
end
local function register(name, verb, flags)
  redis.register_function({
    function_name = LIBRARY .. name,
    callback = function(keys, args)
      begin(keys, args)
      return verb()
    end,
    flags = flags,
  })
end
