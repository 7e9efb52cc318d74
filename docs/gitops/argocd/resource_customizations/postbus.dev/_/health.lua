-- Health of all kinds of postbus.dev, from their conditions.
-- Progressing and Degraded follow kstatus (Reconciling, Stalled), so that Flux says the same.

local function condition(type)
  for _, each in ipairs((obj.status or {}).conditions or {}) do
    if each.type == type then
      return each
    end
  end
  return {}
end

local ready = condition("Ready")
local suspended = { Paused = true, AutoDeletedOnIdle = true, Suspended = true }

if obj.metadata.deletionTimestamp ~= nil then
  local blocked = condition("DeletionBlocked")
  if blocked.status == "True" then
    return { status = "Degraded", message = blocked.message }
  end
  return { status = "Progressing", message = "being deleted" }
end
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "waiting for the operator" }
end
if condition("Reconciling").status == "True" then
  return { status = "Progressing", message = condition("Reconciling").message }
end
if condition("Stalled").status == "True" then
  return { status = "Degraded", message = condition("Stalled").message }
end
if suspended[ready.reason] then
  return { status = "Suspended", message = ready.message }
end
if ready.status == "True" then
  return { status = "Healthy", message = ready.message }
end
if ready.status == nil then
  return { status = "Progressing", message = "waiting for the operator" }
end
return { status = "Degraded", message = ready.message }
