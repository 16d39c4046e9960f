RUN={{run}}
# After a restart, resume from the last checkpoint, with the flags of the first start.
if {{only_first}}[ -e "$RUN/config.json" ]; then
  exec manyhands resume "$RUN" --on {{place}}
fi
exec manyhands train {{job}} --on {{place}} --run-dir "$RUN"{{flags}}
