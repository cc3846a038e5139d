@echo off
rem Sets up the course in this folder and opens it: double-click (see START.md).
setlocal
pushd "%~dp0"
if not exist "setup\start.py" (
  echo The folder setup is not beside start.bat: unpack the whole zip first - right click on it, Extract all.
  goto failed
)
for %%V in (3.12 3.11 3.13) do (
  py -%%V -c "pass" >nul 2>nul
  if not errorlevel 1 (
    py -%%V "setup\start.py" %*
    goto ended
  )
)
python -c "import sys; sys.exit(sys.version_info < (3, 11))" >nul 2>nul
if not errorlevel 1 (
  python "setup\start.py" %*
  goto ended
)
echo kvlab needs Python 3.11 or 3.12: install 3.12 from https://www.python.org/downloads/ and start again.
goto failed
:ended
if not errorlevel 1 goto :eof
:failed
pause
exit /b 1
